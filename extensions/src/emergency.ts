import { Dialog, showDialog } from '@jupyterlab/apputils';
import { TranslationBundle } from '@jupyterlab/translation';

import { hasEnded, ILab, IRun, ISent, reasonOf, Verb } from './api';
import { Model } from './model';
import { closedText, refusedText, stateWord, verbWord } from './words';

/** Milliseconds in which ranks answer: an abort took half a second, a step of a large model takes longer. */
const PATIENCE: Partial<Record<Verb, number>> = { abort: 6000, stop: 15000 };
const LOOK = 500;

/** What came of an action, for a person; `over` says when it need not be read any longer. */
export type Said = (text: string, bad?: boolean, over?: () => boolean) => void;

/**
 * Ends a run although its kernel may be busy or dead: through the run's inbox, and where its ranks do not answer, by
 * ending its lab.
 */
export class Emergency {
  constructor(private readonly model: Model, private readonly trans: TranslationBundle, private readonly say: Said) {}

  /** Ask what is to be done with a run, then do it. */
  async start(run: IRun): Promise<void> {
    const trans = this.trans;
    const result = await showDialog({
      title: trans.__('Emergency stop of %1', run.id),
      body: trans.__(
        'Stop ends the run after the step under way. Abort frees the ranks at once, also stuck ones; nothing is saved. Neither needs the kernel. Engines live on.'
      ),
      buttons: [
        Dialog.cancelButton({ label: trans.__('Cancel') }),
        Dialog.warnButton({ label: trans.__('Stop after this step'), actions: ['stop'] }),
        Dialog.warnButton({ label: trans.__('Abort now'), actions: ['abort'] })
      ],
      defaultButton: 0
    });
    const verb = result.button.actions[0];
    if (verb === 'stop' || verb === 'abort') {
      await this.end(run, verb);
    }
  }

  /** Send a stop or an abort and see that it is carried out. */
  async end(run: IRun, verb: 'stop' | 'abort'): Promise<void> {
    let sent: ISent;
    try {
      sent = await this.model.api.command(run.key, verb);
    } catch (error) {
      this.say(refusedText(this.trans, run, error), true);
      return;
    }
    this.say(this.trans.__('%1 sent to %2', verbWord(this.trans, verb), run.id));
    if (await this.carriedOut(run, sent, PATIENCE[verb] ?? LOOK)) {
      return;
    }
    await this.insist(run, verb);
  }

  /** Wait until the run has ended; false when it has not in time. */
  private async carriedOut(run: IRun, sent: ISent, patience: number): Promise<boolean> {
    const end = Date.now() + patience;
    while (Date.now() < end) {
      await new Promise(resolve => setTimeout(resolve, LOOK));
      const now = await this.model.api.run(run.key, sent.id).catch(() => null);
      if (now?.ack && !now.ack.ok) {
        this.say(now.ack.message, true);
        return true;
      }
      if (now && hasEnded(now)) {
        this.say(
          this.trans.__('%1 %2 at step %3', run.id, stateWord(this.trans, now.state), now.step.toLocaleString())
        );
        await this.model.refresh();
        return true;
      }
    }
    return false;
  }

  /** Ranks did not answer: offer what goes further. */
  private async insist(run: IRun, verb: 'stop' | 'abort'): Promise<void> {
    const trans = this.trans;
    await this.model.refresh().catch(() => undefined);
    const lab = this.model.labOf(run);
    const seconds = Math.round((PATIENCE[verb] ?? 0) / 1000);
    const late = trans.__('The ranks of %1 have not answered within %2 s.', run.id, seconds);
    const buttons = [Dialog.cancelButton({ label: trans.__('Keep waiting') })];
    if (verb === 'stop') {
      buttons.push(Dialog.warnButton({ label: trans.__('Abort now'), actions: ['abort'] }));
    }
    if (lab) {
      buttons.push(Dialog.warnButton({ label: trans.__('Close the lab'), actions: ['close'] }));
    }
    this.say(late, true, () => this.model.runs.some(now => now.key === run.key && hasEnded(now)));
    const result = await showDialog({
      title: trans.__('No answer'),
      body: `${late} ${this.further(lab)}`,
      buttons,
      defaultButton: 0
    });
    const choice = result.button.actions[0];
    if (choice === 'abort') {
      await this.end(run, 'abort');
    } else if (choice === 'close' && lab) {
      await this.close(lab.id);
    }
  }

  private further(lab: ILab | null): string {
    const trans = this.trans;
    if (!lab) {
      return trans.__('Its lab does not live here: end it where it was started.');
    }
    return lab.state === 'ended'
      ? trans.__('The keeper of lab %1 has died: closing it ends what is left of it.', lab.id)
      : trans.__('Closing lab %1 ends its %2 engines, whatever they do, and the run with them.', lab.id, lab.engines);
  }

  /** End a lab with all its processes. */
  async close(lab: string): Promise<void> {
    this.say(this.trans.__('Lab %1 is being closed …', lab), false, () => !this.model.labs.some(one => one.id === lab));
    try {
      const how = await this.model.api.closeLab(lab);
      this.say(closedText(this.trans, lab, how));
    } catch (error) {
      this.say(reasonOf(error), true);
    }
    await this.model.refresh().catch(() => undefined);
  }
}
