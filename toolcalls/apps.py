from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules


class ToolcallsConfig(AppConfig):
    name = "toolcalls"
    verbose_name = "Tool calls"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Find every app's tools; a tool that cannot be registered stops the start."""
        autodiscover_modules("tools")
