"""The auditors' admin of what people decided. Read-only, like the core's."""

from django.contrib import admin

from approvals.models import Decision, Reconciliation
from toolcalls import masking
from toolcalls.admin import AuditAdmin, body_of, exactly


@admin.register(Decision)
class DecisionAdmin(AuditAdmin):
    team = "call__team"
    bodies = ("reason",)
    list_display = ("call", "user", "decision", "channel", exactly("at"))
    list_filter = ("decision", "channel")
    list_select_related = ("call", "user")
    search_fields = ("call__tool_call_id__exact", "user__username__exact")
    search_help_text = "The agent's ID of a call, or a person's name: the whole of it."
    fields = ("call", "user", "decision", "why", "shown_hash", "channel", exactly("at"))

    @admin.display(description="reason")
    def why(self, decision: Decision) -> str:
        return masking.masked_text(decision.reason)

    @admin.display(description="hash of the arguments")
    def shown_hash(self, decision: Decision) -> str:
        return masking.hash_of(decision.call)


@admin.register(Reconciliation)
class ReconciliationAdmin(AuditAdmin):
    team = "call__team"
    bodies = ("evidence", "result")
    list_display = ("call", "user", "verdict", "channel", exactly("at"))
    list_filter = ("verdict", "channel")
    list_select_related = ("call", "user")
    search_fields = ("call__tool_call_id__exact", "user__username__exact")
    search_help_text = "The agent's ID of a call, or a person's name: the whole of it."
    fields = ("call", "user", "verdict", "what", "shown_result", "channel", exactly("at"))

    @admin.display(description="evidence")
    def what(self, reconciliation: Reconciliation) -> str:
        return masking.masked_text(reconciliation.evidence)

    @admin.display(description="result")
    def shown_result(self, reconciliation: Reconciliation) -> str:
        return body_of(reconciliation.call, reconciliation.result)
