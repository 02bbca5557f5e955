"""What people fill in at the desk. Strict: a field that is unknown, missing or sent twice is a fault."""

from typing import Any

from django import forms

from approvals.models import Decision, Reconciliation
from toolcalls.canonical import Malformed, parse

LONGEST_TEXT = 10_000
_OF_DJANGO = {"csrfmiddlewaretoken"}


class Words(forms.CharField):
    """A person's words, kept as typed but for the line ends, which browsers send as CR LF."""

    def __init__(self, *, rows: int, **options: Any) -> None:
        widget = forms.Textarea(attrs={"rows": rows, "autocomplete": "off"})
        super().__init__(max_length=LONGEST_TEXT, strip=False, widget=widget, **options)

    def to_python(self, value: Any) -> Any:
        return (super().to_python(value) or "").replace("\r\n", "\n")

    def validate(self, value: Any) -> None:
        super().validate(value)
        if self.required and not value.strip():
            raise forms.ValidationError(self.error_messages["required"], code="required")


class StrictForm(forms.Form):
    """A form that refuses what it did not ask for: identity and time never come from a browser.

    action: what the person must be able to do for the form to be on the page. words: the field of the person's words.
    """

    action = ""
    words = ""

    def __init__(self, data: Any = None) -> None:
        super().__init__(data, auto_id=f"{self.action}_%s")

    def clean(self) -> dict[str, Any] | None:
        sent = set(self.data) - _OF_DJANGO
        if unknown := sorted(sent - set(self.fields)):
            raise forms.ValidationError(f"There is no field {unknown[0][:60]!r} here.")
        if twice := [name for name in sorted(sent) if len(self.data.getlist(name)) > 1]:  # type: ignore[attr-defined]
            raise forms.ValidationError(f"The field {twice[0]!r} came twice.")
        return super().clean()


class DecisionForm(StrictForm):
    """Approve or reject exactly the arguments that were shown. The buttons carry ``decision``."""

    action, words = "approve", "reason"
    decision = forms.ChoiceField(
        choices=Decision.Verdict.choices,
        error_messages=dict.fromkeys(("required", "invalid_choice"), "Choose approve or reject."),
    )
    arguments_hash = forms.CharField(max_length=64, widget=forms.HiddenInput)
    reason = Words(rows=1, required=False)


class SettleForm(StrictForm):
    """Say what a call of unknown outcome turned out to have done, and how that is known."""

    action, words = "settle", "evidence"
    verdict = forms.ChoiceField(
        choices=[
            (Reconciliation.Verdict.TOOK_EFFECT.value, "It took effect"),
            (Reconciliation.Verdict.DID_NOT_TAKE_EFFECT.value, "It did not take effect"),
            (Reconciliation.Verdict.STILL_UNKNOWN.value, "Still unknown; leave a note"),
        ],
        widget=forms.RadioSelect,
        error_messages=dict.fromkeys(("required", "invalid_choice"), "Choose one of the three."),
    )
    evidence = Words(rows=3, error_messages={"required": "Say how you know."})
    result = forms.CharField(
        required=False, strip=True, widget=forms.Textarea(attrs={"rows": 2, "spellcheck": "false"})
    )

    def clean_result(self) -> Any:
        if not self.cleaned_data["result"]:
            return None
        try:
            return parse(self.cleaned_data["result"])
        except Malformed as fault:
            raise forms.ValidationError(fault.message) from None

    def clean(self) -> dict[str, Any] | None:
        cleaned = super().clean() or self.cleaned_data
        took_effect = cleaned.get("verdict") == Reconciliation.Verdict.TOOK_EFFECT
        if "verdict" in cleaned and not took_effect and cleaned.get("result") is not None:
            self.add_error("result", "Only what took effect has a result.")
        return cleaned


class RunAgainForm(StrictForm):
    """Say why another run is ordered."""

    action, words = "run_again", "evidence"
    evidence = Words(rows=2, error_messages={"required": "Say why another run is right."})


class CancelForm(StrictForm):
    """Nothing to fill in."""

    action = "cancel"


ALL: tuple[type[StrictForm], ...] = (DecisionForm, SettleForm, RunAgainForm, CancelForm)
