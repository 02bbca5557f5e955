"""The rows that exist once, and the queues of the default broker."""

from django.db import migrations

from toolcalls.migrations._pgmq import install_pgmq


def bells(apps, schema_editor):
    for kind in ("call_tool", "call_single_attempt_tool"):
        apps.get_model("toolcalls", "Bell").objects.get_or_create(kind=kind)
    apps.get_model("toolcalls", "SweepPass").objects.get_or_create(pk=1)


class Migration(migrations.Migration):
    dependencies = [("toolcalls", "0001_initial")]
    operations = [
        migrations.RunPython(bells, migrations.RunPython.noop),
        migrations.RunPython(install_pgmq, migrations.RunPython.noop),
    ]
