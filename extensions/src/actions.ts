import { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, InputDialog, showDialog } from '@jupyterlab/apputils';
import { TranslationBundle } from '@jupyterlab/translation';

import { ILab, IRun, ISent, reasonOf, Verb } from './api';
import { Emergency, Said } from './emergency';
import { Model } from './model';

/** Milliseconds in which an answer to a command is waited for, and between looks. */
const ACKED = 30000;
const LOOK = 500;

/** What is used of a notebook's widget; `@jupyterlab/notebook` itself would bring 165 MB of build dependencies. */
interface INotebookLike {
  context?: { ready: Promise<void> };
  content?: { activeCell?: { model: { sharedModel: { source: string; setSource(text: string): void } } } | null };
}

/** What buttons, the palette and the launcher do. Each says what came of it. */
export class Actions {
  readonly emergency: Emergency;
  private listeners: Said[] = [];

  constructor(
    private readonly app: JupyterFrontEnd,
    private readonly model: Model,
    private readonly trans: TranslationBundle
  ) {
    this.emergency = new Emergency(model, trans, (text, bad) => this.say(text, bad));
  }

  /** Have results told to somebody. */
  listen(listener: Said): void {
    this.listeners.push(listener);
  }

  say(text: string, bad = false): void {
    this.listeners.forEach(listener => listener(text, bad));
  }

  /** Ask how many engines, and start a lab. */
  async startLab(): Promise<void> {
    const trans = this.trans;
    const asked = await InputDialog.getNumber({
      title: trans.__('Start a lab'),
      label: trans.__('Engines (one rank each; the laptop preset has 3, quickstart 6)'),
      value: 3,
      okLabel: trans.__('Start')
    });
    if (asked.button.accept) {
      await this.try(async () => {
        const lab = await this.model.api.startLab(Number(asked.value));
        return trans.__('Lab %1 is starting', lab.id);
      });
    }
  }

  /** Ask, and end a lab. */
  async closeLab(lab: ILab): Promise<void> {
    const trans = this.trans;
    const result = await showDialog({
      title: trans.__('Close lab %1?', lab.id),
      body: trans.__('Its %1 engines end, and with them an unfinished run. Checkpoints stay.', lab.engines),
      buttons: [
        Dialog.cancelButton({ label: trans.__('Cancel') }),
        Dialog.warnButton({ label: trans.__('Close the lab') })
      ],
      defaultButton: 0
    });
    if (result.button.accept) {
      await this.emergency.close(lab.id);
    }
  }

  /** Give a run a command. */
  async steer(run: IRun, verb: Verb, args: Record<string, unknown> = {}): Promise<void> {
    let sent: ISent | null = null;
    await this.try(async () => {
      sent = await this.model.api.command(run.key, verb, args);
      return this.trans.__('%1 sent to %2; applied at the next step boundary', verb, run.id);
    });
    if (sent) {
      await this.sayAck(run, sent).catch(() => undefined); // the command is on its way all the same
    }
  }

  /** Tell when all ranks have applied a command, or that it was refused. */
  private async sayAck(run: IRun, sent: ISent): Promise<void> {
    const { trans } = this;
    const end = Date.now() + ACKED;
    while (Date.now() < end) {
      await new Promise(resolve => setTimeout(resolve, LOOK));
      const { ack } = await this.model.api.run(run.key, sent.id);
      if (ack) {
        const applied = trans.__('%1: applied after step %2 on %3 ranks', sent.verb, ack.step, ack.ranks.length);
        this.say(ack.ok ? applied : trans.__('%1 was refused: %2', sent.verb, ack.message), !ack.ok);
        await this.model.refresh();
        return;
      }
    }
  }

  /** Put the cell that attaches to a lab into the notebook at hand, else into a new one. */
  attachLab(lab: ILab): Promise<void> {
    return this.insert(`import mmlab\n\nlab = mmlab.Lab.attach("${lab.id}")\nlab`);
  }

  /** Put the cell that shows a run into the notebook at hand, else into a new one. */
  attachRun(run: IRun): Promise<void> {
    const path = `${this.model.root}/${run.key}`;
    return this.insert(`import mmlab\n\nrun = mmlab.Run.open(${JSON.stringify(path)})\nrun`);
  }

  /** A new notebook whose cell trains on the newest lab, or on one that it starts. */
  async newNotebook(): Promise<void> {
    const lab = this.model.labs[this.model.labs.length - 1];
    const first = lab ? `lab = mmlab.Lab.attach("${lab.id}")` : 'lab = mmlab.Lab(engines=3)';
    await this.fill(
      `import mmlab\n\n${first}\nrun = lab.train(mmlab.Plan.preset("laptop").with_("train.steps=500"))\nrun`
    );
  }

  /** Open the quickstart notebook. */
  async openQuickstart(): Promise<void> {
    await this.try(async () => {
      const path = await this.model.api.notebook();
      await this.app.commands.execute('docmanager:open', { path });
      return '';
    });
  }

  private async insert(text: string): Promise<void> {
    const commands = this.app.commands;
    if (!commands.hasCommand('notebook:insert-cell-below') || !commands.isEnabled('notebook:insert-cell-below')) {
      await this.fill(text);
      return;
    }
    await this.try(async () => {
      const current = this.app.shell.currentWidget as unknown as INotebookLike | null;
      if (current?.content?.activeCell?.model.sharedModel.source.trim()) {
        await commands.execute('notebook:insert-cell-below');
      }
      current?.content?.activeCell?.model.sharedModel.setSource(text);
      return this.trans.__('The cell is in the notebook: run it with Shift+Enter');
    });
  }

  private async fill(text: string): Promise<void> {
    await this.try(async () => {
      const kernelName = this.app.serviceManager.kernelspecs.specs?.default ?? 'python3';
      const panel = (await this.app.commands.execute('notebook:create-new', { kernelName })) as INotebookLike;
      await panel.context?.ready;
      panel.content?.activeCell?.model.sharedModel.setSource(text);
      return this.trans.__('The cell is in the notebook: run it with Shift+Enter');
    });
  }

  private async try(work: () => Promise<string>): Promise<void> {
    try {
      this.say(await work());
      await this.model.refresh();
    } catch (error) {
      this.say(reasonOf(error), true);
    }
  }
}
