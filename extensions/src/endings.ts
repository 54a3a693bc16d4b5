import { hasEnded, IRun } from './api';

/** Ends told at a time: after a night with many runs, those of the newest. */
const MOST = 3;

/** What all tabs know: keys of runs seen alive, and when the newest run of all was made (null: nobody has looked). */
interface INoted {
  alive: string[];
  newest: number | null;
}

/**
 * Tells of the end of each run once, however many tabs look.
 *
 * Which runs were seen alive is kept in the browser's storage: the tab that takes a run out of there tells of its end,
 * also after a reload. A run that is newer than all that were seen may have begun and ended between two looks. Where
 * the browser keeps nothing, each tab remembers by itself.
 */
export class Endings {
  private own: INoted = { alive: [], newest: null };
  private kept = true;

  constructor(private readonly place: string, private readonly tell: (run: IRun) => void) {}

  /** Note what lives, tell of what has ended. */
  async notice(runs: IRun[]): Promise<void> {
    const told = await this.alone(() => this.settle(runs));
    told.slice(0, MOST).forEach(run => this.tell(run));
  }

  private settle(runs: IRun[]): IRun[] {
    const before = this.read();
    const alive = new Set(before.alive);
    const readable = runs.filter(run => run.state !== 'unreadable');
    const missed = (run: IRun) => before.newest !== null && run.created > before.newest;
    const ended = readable.filter(run => hasEnded(run) && (alive.delete(run.key) || missed(run)));
    const present = new Set(runs.map(run => run.key));
    readable.filter(run => !hasEnded(run)).forEach(run => alive.add(run.key));
    const newest = Math.max(before.newest ?? 0, ...readable.map(run => run.created));
    this.write({ alive: [...alive].filter(key => present.has(key)).sort(), newest });
    return ended;
  }

  private read(): INoted {
    if (this.kept) {
      try {
        const found = JSON.parse(localStorage.getItem(this.place) ?? 'null');
        const alive = Array.isArray(found?.alive) ? found.alive.map(String) : [];
        this.own = { alive, newest: typeof found?.newest === 'number' ? found.newest : null };
      } catch (error) {
        this.kept = error instanceof SyntaxError; // else the browser keeps nothing
      }
    }
    return this.own;
  }

  private write(now: INoted): void {
    const changed = JSON.stringify(now) !== JSON.stringify(this.own);
    this.own = now;
    if (this.kept && changed) {
      try {
        localStorage.setItem(this.place, JSON.stringify(now));
      } catch {
        this.kept = false; // it is full: what is in there must not be read again, or ends would be told again
      }
    }
  }

  /** Under a lock of all tabs; browsers have none on pages that come by plain HTTP from elsewhere, or keep nothing. */
  private async alone<T>(work: () => T): Promise<T> {
    if (!navigator.locks || !this.kept) {
      return work();
    }
    let done: { value: T } | null = null;
    const locked = navigator.locks.request(this.place, async () => {
      done = { value: work() };
      return done.value;
    });
    return locked.catch(error => {
      if (done) {
        throw error;
      }
      return work(); // the lock itself was refused
    });
  }
}
