from django.apps import AppConfig


class BenchConfig(AppConfig):
    """The app of the trivial tools, added through `TOOL_APPS` like any app of a customer's."""

    name = "bench"
