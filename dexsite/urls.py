"""Every address of the deployment."""

from django.contrib import admin
from django.contrib.auth import views as sign_in
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import include, path
from django.views import defaults
from drf_spectacular.views import SpectacularJSONAPIView

from dexsite import health
from toolcalls.api import problems


def unknown_api_address(request: HttpRequest, rest: str) -> JsonResponse:
    """Answer an address of the API that does not exist as it answers everything: with a problem."""
    return problems.answer(404, "NOT_FOUND", problems.NOT_FOUND)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    if problems.is_api(request):
        return problems.answer(404, "NOT_FOUND", problems.NOT_FOUND)
    return defaults.page_not_found(request, exception)


def malformed(request: HttpRequest, exception: Exception) -> HttpResponse:
    if problems.is_api(request):
        return problems.answer(400, "MALFORMED", "The request cannot be read.")
    return defaults.bad_request(request, exception)


def internal_error(request: HttpRequest) -> HttpResponse:
    if problems.is_api(request):
        return problems.answer(500, "INTERNAL_ERROR", "Something went wrong here; it is in the log.")
    return defaults.server_error(request)


handler400, handler404, handler500 = malformed, not_found, internal_error

urlpatterns = [
    path("", include("approvals.urls")),
    path("accounts/login/", sign_in.LoginView.as_view(redirect_authenticated_user=True), name="login"),
    path("accounts/logout/", sign_in.LogoutView.as_view(), name="logout"),
    path("admin/", admin.site.urls),
    path("api/v1/", include("toolcalls.api.urls")),
    path("api/v1/", include("approvals.api_urls")),
    path("api/schema/", SpectacularJSONAPIView.as_view(), name="schema"),
    path("api/<path:rest>", unknown_api_address),
    path("healthz", health.alive),
    path("readyz", health.ready),
]
