"""`mmlab deepspeed-config`: DeepSpeed's JSON with a reason for each value."""

from __future__ import annotations

import json as json_module
import sys
from typing import Annotated

import typer

from mmlab.cli.shared import Overrides, PlanArgument, load_plan


def register(app: typer.Typer) -> None:
    """Add `deepspeed-config`."""
    app.command(name="deepspeed-config", rich_help_panel="Plans")(deepspeed_config)


def deepspeed_config(
    plan: PlanArgument,
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Plain JSON, without the comments.")] = False,
) -> None:
    """Print the JSON that a plan gives DeepSpeed, with a comment on each value."""
    from mmlab.plan import deepspeed

    loaded = load_plan(plan, overrides).with_("parallel.engine=deepspeed")
    loaded.check().raise_if_any()
    text = json_module.dumps(deepspeed.config(loaded), indent=2) if json else deepspeed.commented(loaded)
    sys.stdout.write(text + "\n")
