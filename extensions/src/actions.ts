import { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, InputDialog, showDialog } from '@jupyterlab/apputils';
import { TranslationBundle } from '@jupyterlab/translation';

import { ILab, IRun, ISent, reasonOf, Verb } from './api';
import { Cell, ICommands, INotebookLike } from './cell';
import { Emergency, Said } from './emergency';
import { Model } from './model';
import { refusedText, verbWord } from './words';

/** Milliseconds in which an answer to a command is waited for, and between looks. */
const ACKED = 30000;
const LOOK = 500;

/** What came of something, and when that need not be read any longer. */
interface IOutcome {
  text: string;
  bad?: boolean;
  over?: () => boolean;
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
    this.emergency = new Emergency(model, trans, (text, bad, over) => this.say(text, bad, over));
  }

  /** Have results told to somebody. */
  listen(listener: Said): void {
    this.listeners.push(listener);
  }

  say(text: string, bad = false, over?: () => boolean): void {
    this.listeners.forEach(listener => listener(text, bad, over));
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
        return { text: trans.__('Lab %1 is starting', lab.id), over: this.up(lab.id, lab.engines) };
      });
    }
  }

  /** Ask how many engines a lab is to have, and have it start the further ones. */
  async growLab(lab: ILab): Promise<void> {
    const trans = this.trans;
    const asked = await InputDialog.getNumber({
      title: trans.__('More engines for lab %1', lab.id),
      label: trans.__('Engines in all (it has %1; a lab only grows, and a run takes in new ones by a relayout)', lab.engines),
      value: lab.engines + 1,
      okLabel: trans.__('Start them')
    });
    if (asked.button.accept) {
      await this.try(async () => {
        await this.model.api.growLab(lab.id, Number(asked.value));
        return { text: trans.__('Lab %1 grows to %2 engines', lab.id, asked.value), over: this.up(lab.id, Number(asked.value)) };
      });
    }
  }

  /** Whether a lab has been listed with so many engines and starts none any longer, whatever has become of it. */
  private up(id: string, engines: number): () => boolean {
    let listed = false;
    return () => {
      const lab = this.model.labs.find(one => one.id === id);
      listed ||= lab !== undefined && lab.engines >= engines;
      return listed && !(lab && ['queued', 'starting'].includes(lab.state));
    };
  }

  /** Ask, and end a lab. */
  async closeLab(lab: ILab): Promise<void> {
    const trans = this.trans;
    const result = await showDialog({
      title: trans.__('Close lab %1?', lab.id),
      body:
        lab.state === 'ended'
          ? trans.__('Its keeper has died: processes and files that are left of it end. Checkpoints stay.')
          : trans.__('Its %1 engines end, and with them an unfinished run. Checkpoints stay.', lab.engines),
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
    const sent = await this.model.api.command(run.key, verb, args).catch(error => {
      this.say(refusedText(this.trans, run, error), true);
      return null;
    });
    if (sent) {
      this.say(this.trans.__('%1 sent to %2; applied at the next step boundary', verbWord(this.trans, verb), run.id));
      await this.sayAck(run, sent).catch(() => undefined); // the command is on its way all the same
    }
  }

  /** Tell when all ranks have applied a command, or that it was refused. */
  private async sayAck(run: IRun, sent: ISent): Promise<void> {
    const { trans } = this;
    const verb = verbWord(trans, sent.verb);
    const end = Date.now() + ACKED;
    while (Date.now() < end) {
      await new Promise(resolve => setTimeout(resolve, LOOK));
      const { ack } = await this.model.api.run(run.key, sent.id);
      if (ack) {
        const applied = trans.__('%1: applied after step %2 on %3 ranks', verb, ack.step, ack.ranks.length);
        this.say(ack.ok ? applied : trans.__('%1 was refused: %2', verb, ack.message), !ack.ok);
        await this.model.refresh();
        return;
      }
    }
    this.say(trans.__('%1 waits in the inbox of %2; it is applied at its next step boundary', verb, run.id));
  }

  /** Run a cell that attaches to a lab in the notebook at hand, else in a new one. */
  attachLab(lab: ILab): Promise<void> {
    return this.insert(`import mmlab\n\nlab = mmlab.Lab.attach("${lab.id}")\nlab`);
  }

  /** Run a cell that shows a run in the notebook at hand, else in a new one. */
  attachRun(run: IRun): Promise<void> {
    const path = `${this.model.root}/${run.key}`;
    return this.insert(`import mmlab\n\nrun = mmlab.Run.open(${JSON.stringify(path)})\nrun`);
  }

  /** A new notebook whose cell trains on the newest lab, or on one that it starts. */
  async newNotebook(): Promise<void> {
    const lab = this.model.labs.filter(one => one.state !== 'ended' && one.state !== 'failed').pop();
    const first = lab ? `lab = mmlab.Lab.attach("${lab.id}")` : 'lab = mmlab.Lab(engines=3)';
    const text = `import mmlab\n\n${first}\nrun = lab.train(mmlab.Plan.preset("laptop").with_("train.steps=500"))\nrun`;
    await this.try(async () => {
      const cell = await this.fresh(text);
      return { text: this.trans.__('The cell is in the notebook: run it with Shift+Enter'), over: () => cell.ran };
    });
  }

  /** Open the quickstart notebook. */
  async openQuickstart(): Promise<void> {
    await this.try(async () => {
      const path = await this.model.api.notebook();
      await this.app.commands.execute('docmanager:open', { path });
      return { text: '' };
    });
  }

  /** Put a cell into the notebook at hand, else into a new one, and run it as soon as its kernel is idle. */
  private async insert(text: string): Promise<void> {
    await this.try(async () => {
      const cell = (await this.beside(text)) ?? (await this.fresh(text));
      const reason = await cell.run();
      const over = () => cell.ran;
      const { trans } = this;
      switch (reason) {
        case '':
          return { text: trans.__('The cell runs in the notebook'), over };
        case 'none':
          return { text: trans.__('The cell is in the notebook, which has no kernel: choose one, then Shift+Enter'), over };
        case 'busy':
          return { text: trans.__('The cell is in the notebook, whose kernel is busy: Shift+Enter runs it afterwards'), over };
        default:
          return { text: trans.__('The cell is in the notebook: run it with Shift+Enter'), over };
      }
    });
  }

  /** A cell below the active one of the notebook at hand, or that one where it is empty; null without a notebook. */
  private async beside(text: string): Promise<Cell | null> {
    const commands = this.app.commands;
    const panel = this.app.shell.currentWidget as unknown as INotebookLike | null;
    if (!commands.hasCommand('notebook:insert-cell-below') || !commands.isEnabled('notebook:insert-cell-below')) {
      return null;
    }
    if (panel?.content?.activeCell?.model.sharedModel.source.trim()) {
      await commands.execute('notebook:insert-cell-below');
    }
    return panel ? this.put(panel, text) : null;
  }

  /** The first cell of a new notebook. */
  private async fresh(text: string): Promise<Cell> {
    const kernelName = this.app.serviceManager.kernelspecs.specs?.default ?? 'python3';
    const panel = (await this.app.commands.execute('notebook:create-new', { kernelName })) as INotebookLike;
    await panel.context?.ready;
    return this.put(panel, text);
  }

  private put(panel: INotebookLike, text: string): Cell {
    const commands = this.app.commands as ICommands;
    return new Cell(panel, text, commands, () => this.app.shell.currentWidget === (panel as unknown));
  }

  private async try(work: () => Promise<IOutcome>): Promise<void> {
    try {
      const { text, bad, over } = await work();
      await this.model.refresh();
      this.say(text, bad, over);
    } catch (error) {
      this.say(reasonOf(error), true);
    }
  }
}
