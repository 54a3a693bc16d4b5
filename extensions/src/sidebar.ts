import { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';

import { Actions } from './actions';
import { hasEnded, ILab, IRun } from './api';
import { el, IRow, put, Rows } from './dom';
import { icon } from './icon';
import { Model } from './model';
import { RunView } from './runview';
import { SaidLine } from './said';
import { progressText, stateWord, troubleText } from './words';

/** Labs, runs, and the active run with its ranks. */
export class Sidebar extends Widget {
  private readonly trouble = el('p', { class: 'mmlab-trouble', role: 'alert' });
  private readonly said = new SaidLine();
  private readonly noLabs: HTMLElement;
  private readonly noRuns: HTMLElement;
  private readonly labs: Rows<ILab>;
  private readonly runs: Rows<IRun>;
  private readonly start: HTMLButtonElement;
  private readonly view: RunView;

  constructor(private readonly model: Model, private readonly actions: Actions, private readonly trans: TranslationBundle) {
    super();
    this.id = 'mmlab-sidebar';
    this.title.icon = icon;
    this.title.caption = trans.__('mmlab: labs, runs and ranks');
    this.addClass('mmlab-sidebar');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', trans.__('mmlab: labs, runs and ranks'));
    this.start = el('button', { type: 'button', click: () => void actions.startLab() }, trans.__('Start a lab…'));
    const fresh = el('button', { type: 'button', click: () => void actions.newNotebook() }, trans.__('New notebook'));
    this.noLabs = el('p', { class: 'mmlab-none' }, trans.__('No lab lives.'));
    this.noRuns = el('p', { class: 'mmlab-none' }, trans.__('No runs below the folder of this server.'));
    const labs = el('ul', { class: 'mmlab-list' });
    const runs = el('ul', { class: 'mmlab-list mmlab-runs' });
    this.labs = new Rows(labs, lab => lab.id, lab => this.labRow(lab));
    this.runs = new Rows(runs, run => run.key, run => this.runRow(run));
    this.view = new RunView(model, actions, trans);
    this.node.append(
      el('h2', {}, 'mmlab'),
      this.trouble,
      el('div', { class: 'mmlab-buttons' }, this.start, fresh),
      this.said.node,
      el('section', {}, el('h3', {}, trans.__('Labs')), this.noLabs, labs),
      this.view.node,
      el('section', {}, el('h3', {}, trans.__('Runs')), this.noRuns, runs)
    );
    actions.listen((text, bad, over) => this.said.say(text, bad, over));
    model.changed.connect(this.renew, this);
    this.renew();
  }

  protected onAfterShow(): void {
    this.look(true);
  }

  protected onAfterHide(): void {
    this.look(false);
  }

  protected onAfterAttach(): void {
    this.look(this.isVisible);
  }

  private look(seen: boolean): void {
    this.model.seen = seen;
    if (seen) {
      this.model.refresh().catch(() => undefined);
    }
  }

  private renew(): void {
    const { model, trans } = this;
    let trouble = model.problem;
    if (model.trouble) {
      trouble = troubleText(trans, model.trouble);
    } else if (model.asked && !model.allowControl) {
      trouble = [trans.__('This server only shows runs; steering is switched off.'), model.problem].join(' ').trim();
    }
    put(this.trouble, trouble);
    this.start.disabled = !model.allowControl;
    this.noLabs.hidden = model.labs.length > 0;
    this.noRuns.hidden = model.runs.length > 0;
    this.labs.update(model.labs);
    this.runs.update(model.runs);
    this.view.renew();
  }

  private labRow(lab: ILab): IRow<ILab> {
    const { trans } = this;
    let now = lab;
    const name = el('span', { class: 'mmlab-name' }, trans.__('lab %1', lab.id));
    const state = el('span', { class: 'mmlab-soft' });
    const attach = el('button', { type: 'button', click: () => void this.actions.attachLab(now) }, trans.__('Attach'));
    attach.title = trans.__('Run a cell that attaches to lab %1 in the notebook', lab.id);
    const grow = el('button', { type: 'button', click: () => void this.actions.growLab(now) }, trans.__('Grow…'));
    grow.title = trans.__('Start more engines in lab %1', lab.id);
    grow.setAttribute('aria-label', trans.__('More engines for lab %1', lab.id));
    const close = el('button', { type: 'button', click: () => void this.actions.closeLab(now) }, trans.__('Close…'));
    close.setAttribute('aria-label', trans.__('Close lab %1', lab.id));
    attach.setAttribute('aria-label', trans.__('Attach lab %1 to the notebook', lab.id));
    const buttons = el('span', { class: 'mmlab-buttons' }, attach, grow, close);
    const node = el('li', { class: 'mmlab-lab' }, el('div', {}, name, ' ', state), buttons);
    const update = (found: ILab) => {
      now = found;
      const engines = trans.__('%1 of %2 engines', found.ready, found.engines);
      const outside = found.outside ? ` · ${trans.__('%1 runs elsewhere', found.outside)}` : '';
      const dead = found.state === 'ended'; // its keeper died: nothing of it can be used
      const parts = [stateWord(trans, found.state), dead ? '' : engines + outside, found.reason];
      put(state, parts.filter(Boolean).join(' · '));
      node.dataset.state = dead ? 'failed' : found.state;
      attach.disabled = dead;
      grow.disabled = dead || !this.model.allowControl;
      close.disabled = !this.model.allowControl;
    };
    return { node, update };
  }

  private runRow(run: IRun): IRow<IRun> {
    const { trans, model } = this;
    const name = el('span', { class: 'mmlab-name' }, run.id);
    const state = el('span', { class: 'mmlab-soft' });
    const button = el('button', { type: 'button', click: () => model.choose(run.key) }, name, state);
    button.title = run.key;
    const node = el('li', { class: 'mmlab-run' }, button);
    const update = (found: IRun) => {
      put(state, `${stateWord(trans, found.state)} · ${progressText(trans, found)}`);
      node.dataset.state = hasEnded(found) ? found.state : 'alive';
      const active = model.active?.key === found.key;
      button.setAttribute('aria-current', String(active));
    };
    return { node, update };
  }
}
