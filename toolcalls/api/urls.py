"""Addresses of the agents' door, under /api/v1/."""

from django.urls import path

from toolcalls.api import views

SESSION = "sessions/<str:session_id>"
TURN = f"{SESSION}/turns/<str:turn_id>"

urlpatterns = [
    path("sessions", views.Sessions.as_view()),
    path(SESSION, views.OneSession.as_view()),
    path(f"{SESSION}/close", views.CloseSession.as_view()),
    path(f"{SESSION}/cancel", views.CancelSession.as_view()),
    path(f"{TURN}/calls", views.TurnCalls.as_view()),
    path(f"{TURN}/calls/<str:tool_call_id>", views.OneCallOfTurn.as_view()),
    path(f"{TURN}/cancel", views.CancelTurn.as_view()),
    path(f"{TURN}/acknowledge", views.Acknowledge.as_view()),
    path("calls", views.Calls.as_view()),
    path("calls/<uuid:call_id>", views.OneCall.as_view()),
    path("calls/<uuid:call_id>/cancel", views.CancelCall.as_view()),
    path("tools", views.Tools.as_view()),
]
