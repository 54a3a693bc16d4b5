import { Poll } from '@lumino/polling';
import { ISignal, Signal } from '@lumino/signaling';

import { Api, hasEnded, ILab, IOverview, IRun, IRunDetails, isGone, reasonOf, Refusal } from './api';
import { Endings } from './endings';

/** Milliseconds between looks while something lives, while it does and nobody sees the sidebar, and else. */
const BUSY = 1500;
const UNSEEN = 4000;
const IDLE = 10000;
/** The longest pause between attempts when the server does not answer. */
const LONGEST = 30000;

/** What pages know of labs and runs. One poll asks for all of it; it rests while the page is hidden. */
export class Model {
  labs: ILab[] = [];
  runs: IRun[] = [];
  root = '';
  allowControl = false;
  /** The active run with its ranks; null without any run. */
  details: IRunDetails | null = null;
  /** Why there is nothing to show; null while the server answers. */
  trouble: Refusal | null = null;
  /** What the server says of its folder, or of the active run where that cannot be read. */
  problem = '';
  /** Whether the server was asked at least once. */
  asked = false;
  /** Whether somebody sees the sidebar. */
  seen = false;

  private readonly poll: Poll;
  private readonly signal = new Signal<this, void>(this);
  private chosen = '';
  private alive = new Set<string>();
  private turn = 0;

  constructor(readonly api: Api, private readonly endings: Endings) {
    this.poll = new Poll({
      name: 'mmlab:overview',
      factory: () => this.look(),
      frequency: this.frequency(IDLE),
      standby: 'when-hidden'
    });
    window.addEventListener('focus', () => {
      if (this.trouble) {
        void this.refresh(); // somebody looks: the pause may have become long
      }
    });
  }

  get changed(): ISignal<this, void> {
    return this.signal;
  }

  /**
   * The run that buttons and the status bar are about: the one chosen (of one that has ended: until another begins),
   * else the newest that lives, else the newest.
   */
  get active(): IRun | null {
    const chosen = this.runs.find(run => run.key === this.chosen);
    const atWork = this.runs.find(run => !hasEnded(run) && run.state !== 'queued'); // a queued one waits for its end
    return chosen ?? atWork ?? this.runs.find(run => !hasEnded(run)) ?? this.runs[0] ?? null;
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
    const turn = ++this.turn;
    const overtaken = () => turn !== this.turn; // a later look, whose answer came first, knows more
    try {
      const found = await this.api.overview();
      if (overtaken()) {
        return;
      }
      this.take(found);
      const details = await this.lookCloser();
      if (overtaken()) {
        return;
      }
      this.details = details;
      this.trouble = null;
    } catch (error) {
      if (overtaken()) {
        return;
      }
      this.trouble = error instanceof Refusal ? error : new Refusal(String(error), 0);
      throw error; // the poll asks ever more seldom
    } finally {
      if (!overtaken()) {
        this.asked = true;
        this.signal.emit();
      }
    }
    const lives = this.runs.some(run => !hasEnded(run)) || this.labs.some(lab => lab.state === 'starting');
    const interval = lives ? (this.seen ? BUSY : UNSEEN) : IDLE;
    if (this.poll.frequency.interval !== interval) {
      this.poll.frequency = this.frequency(interval);
    }
  }

  /** The active run with its ranks, where somebody sees it and it can be read. */
  private async lookCloser(): Promise<IRunDetails | null> {
    const active = this.active;
    if (!this.seen || !active || active.state === 'unreadable') {
      return null;
    }
    try {
      return await this.api.run(active.key);
    } catch (error) {
      if (error instanceof Refusal && error.status > 0) {
        this.problem ||= isGone(error) ? '' : reasonOf(error); // a run that is gone leaves the list with the next look
        return null;
      }
      throw error;
    }
  }

  private take(found: IOverview): void {
    const alive = found.runs.filter(run => !hasEnded(run)).map(run => run.key);
    if (!alive.includes(this.chosen) && alive.some(key => !this.alive.has(key))) {
      this.chosen = '';
    }
    this.alive = new Set(alive);
    this.problem = found.problem ?? '';
    this.labs = found.labs;
    this.runs = found.runs;
    this.root = found.root;
    this.allowControl = found.allow_control;
    this.endings.notice(found.runs).catch(error => console.warn('mmlab: ends of runs are not told:', error));
  }
}
