"""Addresses of the operators' desk."""

from django.urls import path

from approvals import views

urlpatterns = [
    path("", views.queue, name="queue"),
    path("unknown/", views.unknown, name="unknown"),
    path("calls/<uuid:call_id>/", views.call, name="call"),
    path("calls/<uuid:call_id>/decide/", views.decide, name="decide"),
    path("calls/<uuid:call_id>/cancel/", views.cancel, name="cancel"),
    path("calls/<uuid:call_id>/settle/", views.settle, name="settle"),
    path("calls/<uuid:call_id>/run-again/", views.run_again, name="run_again"),
]
