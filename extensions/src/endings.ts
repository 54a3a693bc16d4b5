import { hasEnded, IRun } from './api';

/**
 * Tells of the end of each run once, however many tabs look.
 *
 * Which runs were seen alive is kept in the browser's storage: the tab that takes a run out of there tells of its end,
 * also after a reload.
 */
export class Endings {
  constructor(private readonly place: string, private readonly tell: (run: IRun) => void) {}

  /** Note what lives, tell of what has ended. */
  async notice(runs: IRun[]): Promise<void> {
    const told = await this.alone(() => this.settle(runs));
    told.forEach(run => this.tell(run));
  }

  private settle(runs: IRun[]): IRun[] {
    const before = this.read();
    const alive = new Set(before);
    const ended = runs.filter(run => hasEnded(run) && alive.delete(run.key));
    const present = new Set(runs.map(run => run.key));
    runs.filter(run => !hasEnded(run)).forEach(run => alive.add(run.key));
    const after = [...alive].filter(key => present.has(key)).sort();
    if (after.join('\n') !== before.join('\n')) {
      localStorage.setItem(this.place, JSON.stringify(after));
    }
    return ended;
  }

  private read(): string[] {
    try {
      const found = JSON.parse(localStorage.getItem(this.place) ?? '[]');
      return Array.isArray(found) ? found.map(String) : [];
    } catch {
      return [];
    }
  }

  /** Under a lock of all tabs; browsers have none on pages that come by plain HTTP from elsewhere. */
  private async alone<T>(work: () => T): Promise<T> {
    return navigator.locks ? navigator.locks.request(this.place, async () => work()) : work();
  }
}
