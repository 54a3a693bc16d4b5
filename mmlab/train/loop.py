"""The training loop."""

from __future__ import annotations

from mmlab.train.session import Session


def train(session: Session) -> str:
    """Run until the plan's steps are done or a command stops the run; returns the final state, or "moved" where the
    next generation takes over."""
    session.apply_commands()
    while session.steering.step < session.plan.train.steps and not session.over:
        session.step()
        session.evaluate_if_due()
        session.saves.if_due()
        session.apply_commands()
    if session.moving:
        return "moved"
    session.saves.end()  # before the evaluation: whatever goes wrong in that, the weights are kept
    if not session.steering.stopped:
        session.evaluate()
    return "stopped" if session.steering.stopped else "finished"
