"""Addresses of the operators' door, under /api/v1/."""

from django.urls import path

from approvals import api

urlpatterns = [
    path("approvals", api.Approvals.as_view()),
    path("approvals/decide", api.DecideSeveral.as_view()),
    path("approvals/<uuid:call_id>/approve", api.Approve.as_view()),
    path("approvals/<uuid:call_id>/reject", api.Reject.as_view()),
    path("approvals/<uuid:call_id>/amend", api.Amend.as_view()),
    path("unknown-outcomes", api.UnknownOutcomes.as_view()),
    path("unknown-outcomes/<uuid:call_id>/settle", api.Settle.as_view()),
    path("unknown-outcomes/<uuid:call_id>/run-again", api.RunAgain.as_view()),
]
