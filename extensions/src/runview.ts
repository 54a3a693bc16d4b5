import { TranslationBundle } from '@jupyterlab/translation';

import { Actions } from './actions';
import { hasEnded, IRank, IRun, Verb } from './api';
import { el, IRow, put, Rows, Sparkline } from './dom';
import { Model } from './model';
import { phaseWord, progressText, stateWord } from './words';

/** The active run: state, loss curve, buttons, ranks. */
export class RunView {
  readonly node: HTMLElement;
  private readonly name = el('h3', { class: 'mmlab-id' });
  private readonly state = el('p', { class: 'mmlab-state' });
  private readonly reason = el('p', { class: 'mmlab-reason' });
  private readonly bar = el('progress', { max: '1', value: '0' });
  private readonly curve = new Sparkline();
  private readonly steps: HTMLInputElement;
  private readonly steering: [HTMLButtonElement, (run: IRun) => boolean][] = [];
  private readonly emergency: HTMLButtonElement;
  private readonly ranks: Rows<IRank>;
  private readonly table: HTMLElement;

  constructor(private readonly model: Model, private readonly actions: Actions, private readonly trans: TranslationBundle) {
    this.steps = el('input', { type: 'number', min: '1', value: '3', 'aria-label': trans.__('Steps to run') });
    const paused = (run: IRun) => run.state === 'paused';
    const running = (run: IRun) => !hasEnded(run);
    const pause = this.button(trans.__('Pause'), 'pause', run => running(run) && !paused(run));
    const resume = this.button(trans.__('Resume'), 'resume', paused);
    const step = this.button(trans.__('Step'), 'step', running, () => ({ n: Math.max(1, Math.round(Number(this.steps.value) || 1)) }));
    const save = this.button(trans.__('Checkpoint'), 'checkpoint', running);
    const stop = this.button(trans.__('Stop'), 'stop', running);
    const attach = el('button', { type: 'button', click: () => this.withRun(run => void actions.attachRun(run)) }, trans.__('Show in notebook'));
    const emergency = () => this.withRun(run => void actions.emergency.start(run));
    this.emergency = el('button', { type: 'button', class: 'mmlab-emergency', click: emergency }, trans.__('Emergency stop…'));
    this.emergency.title = trans.__('Works while the kernel is busy or dead');
    const body = el('tbody');
    this.ranks = new Rows(body, rank => String(rank.rank), () => this.rankRow());
    const heads = [trans.__('rank'), trans.__('role'), trans.__('step'), trans.__('does'), trans.__('process')];
    this.table = el(
      'table',
      { class: 'mmlab-ranks' },
      el('caption', {}, trans.__('Ranks')),
      el('thead', {}, el('tr', {}, ...heads.map(text => el('th', { scope: 'col' }, text)))),
      body
    );
    this.bar.setAttribute('aria-label', trans.__('Steps done'));
    this.node = el(
      'section',
      { class: 'mmlab-view' },
      this.name,
      this.state,
      this.bar,
      this.curve.node as unknown as HTMLElement,
      el('div', { class: 'mmlab-buttons' }, pause, resume, save, stop),
      el('div', { class: 'mmlab-buttons' }, this.steps, step, attach),
      this.emergency,
      this.reason,
      this.table
    );
  }

  /** Show the active run as the model knows it. */
  renew(): void {
    const { model, trans } = this;
    const run = model.active;
    this.node.hidden = run === null;
    if (!run) {
      return;
    }
    const details = model.details?.key === run.key ? model.details : null;
    const shown = details ?? run;
    put(this.name, shown.id);
    put(this.state, `${stateWord(trans, details?.doing ?? shown.state)} · ${progressText(trans, shown)}`);
    this.node.dataset.state = hasEnded(shown) ? shown.state : 'alive';
    put(this.reason, shown.reason);
    this.reason.classList.toggle('mmlab-bad', shown.state === 'failed' || shown.state === 'starting');
    this.bar.max = Math.max(1, shown.steps);
    this.bar.value = shown.step;
    this.steering.forEach(([button, fits]) => {
      button.disabled = !model.allowControl || !fits(shown);
    });
    this.emergency.disabled = !model.allowControl || hasEnded(shown);
    this.curve.update(details?.curve ?? []);
    this.table.hidden = !details?.ranks.length;
    this.ranks.update(details?.ranks ?? []);
  }

  private withRun(work: (run: IRun) => void): void {
    const run = this.model.active;
    if (run) {
      work(run);
    }
  }

  private button(
    label: string,
    verb: Verb,
    fits: (run: IRun) => boolean,
    args: () => Record<string, unknown> = () => ({})
  ): HTMLButtonElement {
    const click = () => this.withRun(run => void this.actions.steer(run, verb, args()));
    const made = el('button', { type: 'button', click }, label);
    this.steering.push([made, fits]);
    return made;
  }

  private rankRow(): IRow<IRank> {
    const { trans } = this;
    const cells = [el('th', { scope: 'row' }), el('td'), el('td'), el('td'), el('td')];
    const node = el('tr', {}, ...cells);
    const update = (rank: IRank) => {
      const lives = rank.alive === null ? trans.__('on %1', rank.host) : rank.alive ? trans.__('lives') : trans.__('gone');
      const texts = [String(rank.rank), rank.role, String(rank.step), phaseWord(trans, rank.phase), lives];
      texts.forEach((text, index) => put(cells[index] as Element, text));
      node.dataset.alive = String(rank.alive ?? 'unknown');
      node.title = trans.__('process %1 on %2', String(rank.pid), rank.host);
    };
    return { node, update };
  }
}
