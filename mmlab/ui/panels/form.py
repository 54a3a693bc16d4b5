"""The form of a plan: fields from the schema, problems with fixes, figures, and the same plan in words."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.errors import PlanError
from mmlab.plan import Change, Diff, Key, Plan, Problems, known_keys, preset_names
from mmlab.plan.draft import MOST_CHECKED
from mmlab.plan.entry import entry, shown, unit
from mmlab.plan.idle import idle_fields
from mmlab.plan.keys import get, sections
from mmlab.plan.memory import Memory, ranks_text
from mmlab.plan.spelled import Spelled
from mmlab.ui.panel import Panel

if TYPE_CHECKING:
    from mmlab.ui.form import PlanSource

MOST_DRAWN = 4_000
"""Ranks x microbatches x chunks up to which the schedule is drawn as one types: vlm-70b's 2,688 take 0.3 s, 360 kB."""
MOST_PLACED = 300
"""Ranks up to which the layout is drawn: 84 take 33 kB."""
FIRST = frozenset(
    {
        "name",
        *(f"parallel.{name}" for name in ("vision", "vision_dp", "dp", "tp", "pp", "cp", "schedule", "microbatches")),
        "parallel.sharding",
        *(f"model.vision.{name}" for name in ("image_size", "patch_size", "hidden", "layers", "heads")),
        *(f"model.language.{name}" for name in ("vocab_size", "hidden", "layers", "heads", "kv_heads")),
        *(f"data.{name}" for name in ("path", "global_batch", "seq_len")),
        "train.steps",
        *(f"train.{module}.{name}" for module in ("vision", "projector", "language") for name in ("lr", "frozen")),
    }
)
"""The few that matter first; the others of their sections are folded."""
ORDER = ("parallel", "model", "data", "train")
"""Sections that come first."""


def fields() -> list[dict[str, Any]]:
    """Every field of the schema as the page needs it: how it is entered, unit, bounds, choices, help, default."""
    keys = sorted(known_keys().values(), key=lambda key: _rank(key.name))  # stable: else in the order of the schema
    return [_field(key) for key in keys]


def _rank(name: str) -> int:
    top = name.partition(".")[0]
    return -1 if "." not in name else ORDER.index(top) if top in ORDER else len(ORDER)


def _field(key: Key) -> dict[str, Any]:
    section, _, leaf = key.name.rpartition(".")
    return {
        "key": key.name,
        "label": leaf,
        "section": section,
        "first": key.name in FIRST,
        "entry": entry(key),
        "choices": list(key.choices),
        "unit": unit(key),
        "bounds": key.expects if entry(key) == "list" else key.bounds.removeprefix(", "),
        "help": key.doc,
        "default": shown(key.default),
        "live": key.live,
    }


class FormPanel(Panel):
    """All of the form."""

    name = "form"
    title = "Plan"
    slow = frozenset({"pictures", "train", "repaired", "repair"})
    lasting = True
    spoken = (
        *(f"fields.*.{name}" for name in ("help", "unit", "bounds")), "sections.*", "idle.*", "mistyped.*.reason",
        "problems.*.message", "problems.*.fix", "roles.*", "memory", "undo", "redo",
        "layout", "layout_not", "schedule", "schedule_not",
    )  # fmt: skip

    def __init__(self, source: PlanSource) -> None:
        self.source = source
        self._fields = fields()
        self._made = -1
        self._frame: dict[str, Any] = {}

    def frame(self) -> dict[str, Any]:
        """The fields once, and how they stand; made anew when the plan has changed."""
        draft = self.source.draft
        if self._made != draft.revision:
            self._made = draft.revision
            self._frame = self._state()
        run = self.source.run
        return {**self._frame, "run": None if run is None else {"id": run.id, "name": run.plan.name}}

    def _state(self) -> dict[str, Any]:
        draft, plan = self.source.draft, self.source.draft.plan
        problems = draft.problems()
        return {
            "fields": self._fields,
            "sections": dict(sections()),
            "presets": preset_names(),
            "lab": self.source.lab is not None,
            "revision": draft.revision,
            "base": {"kind": draft.base.kind, "name": draft.base.name},
            "undo": draft.undoes,
            "redo": draft.redoes,
            "changed": {change.key: shown(change.before) for change in draft.spelled.changes},
            "mistyped": {key: {"text": wrong.text, "reason": wrong.reason} for key, wrong in draft.mistyped.items()},
            "idle": idle_fields(plan),
            "problems": _problems(problems),
            "ranks": plan.world_size,
            "roles": _roles(plan),
            "memory": _memory(plan, draft.checkable),
            "said": _said(draft.spelled),
            **{f"={key}": shown(get(plan, key)) for key in known_keys()},
        }

    def handle(self, verb: str, args: dict[str, Any]) -> Any:
        """A change that a page asks for, or something that it wants to know."""
        if verb == "pictures":
            with self.source.lock:
                plan = self.source.draft.plan
            return pictures(plan)
        if verb == "train":
            run = self.source.train()
            return {"run": run.id}
        with self.source.lock:
            return self._change(verb, args)

    def _change(self, verb: str, args: dict[str, Any]) -> Any:
        draft = self.source.draft
        if verb == "enter":
            return {"ok": draft.enter(str(args["key"]), str(args["text"]), str(args.get("edit", "")))}
        if verb == "reset":
            draft.reset(str(args["key"]))
        elif verb == "fix":
            draft.fix([str(change) for change in args["overrides"]])
        elif verb == "repaired":
            return {"changes": _changes(draft.repaired())}
        elif verb in ("repair", "undo", "redo"):
            getattr(draft, verb)()
        elif verb == "start":
            draft.start(str(args["preset"]))
        elif verb == "load":
            draft.load(str(args["path"]))
        elif verb == "save":
            return self._save(str(args["path"]), bool(args.get("overwrite")))
        elif verb == "toml":
            return {"text": draft.plan.dumps(comments=bool(args.get("comments")))}
        else:
            raise ValueError(f"unknown request {verb!r}")
        return {"revision": draft.revision}

    def _save(self, path: str, overwrite: bool) -> dict[str, Any]:
        if path.strip() and not overwrite and Path(path.strip()).expanduser().is_file():
            return {"there": path.strip()}
        return {"saved": str(self.source.draft.save(path, overwrite))}

    def text(self) -> str:
        """What differs from the base, and the problems."""
        draft = self.source.draft
        changes = draft.spelled.changes
        from_ = f"{draft.plan.name}: {draft.plan.world_size} ranks, from {draft.base.kind} {draft.base.name}"
        typed = [f"{key}: {wrong.reason}; the plan keeps {shown(get(draft.plan, key))}" for key, wrong in self._typed()]
        return "\n".join([from_, str(changes), *typed, str(draft.problems())])

    def _typed(self) -> list[tuple[str, Any]]:
        return list(self.source.draft.mistyped.items())

    def html(self) -> str:
        """The same as tables."""
        draft = self.source.draft
        base = f"{draft.base.kind} {draft.base.name}"
        head = f"<p><b>{escape(draft.plan.name)}</b>: {draft.plan.world_size} ranks; from {escape(base)} differ:</p>"
        typed = "".join(f"<p>{escape(key)}: {escape(wrong.reason)}</p>" for key, wrong in self._typed())
        return head + draft.spelled.changes._repr_html_() + typed + draft.problems()._repr_html_()


def _problems(problems: Problems) -> list[dict[str, Any]]:
    return [
        {
            "field": problem.field,
            "message": problem.message,
            "fix": problem.fix.sentence,
            "overrides": list(problem.fix),
            "changes": _changes(_fixed(problems.plan, list(problem.fix))),
        }
        for problem in problems
    ]


def _fixed(plan: Plan, overrides: list[str]) -> Diff:
    """What a fix changes; nothing where it cannot be applied."""
    try:
        return plan.diff(plan.with_(*overrides))
    except PlanError:
        return Diff()


def _changes(changes: list[Change]) -> list[list[str]]:
    return [[change.key, shown(change.before), shown(change.after)] for change in changes]


def _roles(plan: Plan) -> list[str]:
    """How the ranks come about, in words."""
    p = plan.parallel
    grid = " x ".join(f"{name} {getattr(p, name)}" for name in ("dp", "pp", "cp", "tp"))
    own = p.vision_dp if p.vision == "own_ranks" else 0
    rest = f"{plan.world_size - own} for the language model: {grid}"
    merged = {"first_stage": "those of the first stage encode too", "all_ranks": "all of them encode too"}
    return [f"{own} for the encoder", rest] if own else [rest, *filter(None, [merged.get(p.vision)])]


def _memory(plan: Plan, small: bool) -> dict[str, Any]:
    """Bytes of each rank's share, equal ones in one row."""
    if not small:
        return {"rows": [], "notes": [f"Not computed beyond {MOST_CHECKED:,} ranks."]}
    try:
        memory = Memory(plan)
    except (ArithmeticError, LookupError, ValueError):
        return {"rows": [], "notes": ["Not known while the plan has these problems."]}
    rows = [[ranks_text(r.ranks), r.what, r.parameters, *r.state, r.activations, r.total] for r in memory.rows]
    return {"rows": rows, "notes": memory.notes}


def _said(spelled: Spelled) -> dict[str, str]:
    return {"toml": spelled.toml, "python": spelled.python, "command": spelled.command}


def pictures(plan: Plan) -> dict[str, str]:
    """The layout and the schedule as SVG, or a sentence that says why not. Bounded: see MOST_DRAWN, MOST_PLACED."""
    p = plan.parallel
    work = plan.world_size * p.microbatches * p.chunks_per_rank
    found: dict[str, str] = {}
    try:
        if plan.world_size <= MOST_PLACED:
            found["layout"] = plan.layout().svg()
        else:
            found["layout_not"] = f"{plan.world_size:,} ranks are not drawn as you type; plan.layout() shows them."
        if work <= MOST_DRAWN:
            found["schedule"] = plan.schedule().svg()
        else:
            found["schedule_not"] = (
                f"{plan.world_size:,} ranks with {p.microbatches:,} microbatches are not drawn as you type; "
                "plan.schedule() shows them."
            )
    except (ArithmeticError, LookupError, ValueError, RuntimeError):
        missing = "schedule_not" if "layout" in found or "layout_not" in found else "layout_not"
        found[missing] = "There is none while the plan has these problems."
    return found
