import { Poll } from '@lumino/polling';
import { ISignal, Signal } from '@lumino/signaling';

import { Api, hasEnded, ILab, IOverview, IRun, IRunDetails, Refusal } from './api';
import { Endings } from './endings';

/** Milliseconds between looks while something lives, while it does and nobody sees the sidebar, and else. */
const BUSY = 1500;
const UNSEEN = 4000;
const IDLE = 10000;
/** The longest pause between attempts when the server does not answer. */
const LONGEST = 60000;

/** What pages know of labs and runs. One poll asks for all of it; it rests while the page is hidden. */
export class Model {
  labs: ILab[] = [];
  runs: IRun[] = [];
  root = '';
  allowControl = false;
  /** The active run with its ranks; null without any run. */
  details: IRunDetails | null = null;
  /** Why there is nothing to show; empty while the server answers. */
  trouble: Refusal | null = null;
  /** Whether the server was asked at least once. */
  asked = false;
  /** Whether somebody sees the sidebar. */
  seen = false;

  private readonly poll: Poll;
  private readonly signal = new Signal<this, void>(this);
  private chosen = '';

  constructor(readonly api: Api, private readonly endings: Endings) {
    this.poll = new Poll({
      name: 'mmlab:overview',
      factory: () => this.look(),
      frequency: this.frequency(IDLE),
      standby: 'when-hidden'
    });
  }

  get changed(): ISignal<this, void> {
    return this.signal;
  }

  /** The run that buttons and the status bar are about: the one chosen, else the newest that lives, else the newest. */
  get active(): IRun | null {
    const chosen = this.runs.find(run => run.key === this.chosen);
    return chosen ?? this.runs.find(run => !hasEnded(run)) ?? this.runs[0] ?? null;
  }

  /** Make a run the active one. */
  choose(key: string): void {
    this.chosen = key;
    this.details = this.details?.key === key ? this.details : null;
    this.signal.emit();
    void this.refresh();
  }

  /** The lab that a run is at work in, if it lives. */
  labOf(run: IRun): ILab | null {
    return this.labs.find(lab => lab.id === run.lab) ?? null;
  }

  /** Ask now. */
  refresh(): Promise<void> {
    return this.poll.refresh();
  }

  private frequency(interval: number): Poll['frequency'] {
    return { interval, backoff: true, max: LONGEST };
  }

  private async look(): Promise<void> {
    try {
      this.take(await this.api.overview());
      const active = this.active;
      const wanted = this.seen && active && active.state !== 'unreadable';
      this.details = wanted ? await this.api.run(active.key) : null;
      this.trouble = null;
    } catch (error) {
      this.trouble = error instanceof Refusal ? error : new Refusal(String(error), 0);
      throw error; // the poll asks ever more seldom
    } finally {
      this.asked = true;
      this.signal.emit();
    }
    const lives = this.runs.some(run => !hasEnded(run)) || this.labs.some(lab => lab.state === 'starting');
    const interval = lives ? (this.seen ? BUSY : UNSEEN) : IDLE;
    if (this.poll.frequency.interval !== interval) {
      this.poll.frequency = this.frequency(interval);
    }
  }

  private take(found: IOverview): void {
    this.labs = found.labs;
    this.runs = found.runs;
    this.root = found.root;
    this.allowControl = found.allow_control;
    void this.endings.notice(found.runs);
  }
}
