import { el, put } from './dom';

/** Milliseconds that a message stays: as such, while it waits to come true, and of something gone wrong. */
const STAYS = 15000;
const WAITS = 300000;
const WARNS = 120000;
const LOOK = 500;

/** A line that says what came of the last action; it leaves when that has come true, or after a while. */
export class SaidLine {
  readonly node = el('p', { class: 'mmlab-said', role: 'status' });
  private timer: ReturnType<typeof setInterval> | undefined;

  say(text: string, bad = false, over?: () => boolean): void {
    clearInterval(this.timer);
    put(this.node, text);
    this.node.classList.toggle('mmlab-bad', bad);
    if (!text) {
      return;
    }
    const end = Date.now() + (over ? WAITS : bad ? WARNS : STAYS);
    this.timer = setInterval(() => {
      if (Date.now() > end || over?.()) {
        this.say('');
      }
    }, LOOK);
  }
}
