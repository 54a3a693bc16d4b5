import { TranslationBundle } from '@jupyterlab/translation';

import { IRun } from './api';

/** A run's state in the reader's language. */
export function stateWord(trans: TranslationBundle, state: string): string {
  const words: Record<string, string> = {
    queued: trans.__('queued'),
    starting: trans.__('starting'),
    ready: trans.__('ready'),
    running: trans.__('running'),
    evaluating: trans.__('evaluating'),
    saving: trans.__('saving'),
    paused: trans.__('paused'),
    failed: trans.__('failed'),
    finished: trans.__('finished'),
    stopped: trans.__('stopped'),
    ended: trans.__('ended'),
    unreadable: trans.__('unreadable')
  };
  return words[state] ?? state;
}

/** Steps done and loss of a run. */
export function progressText(trans: TranslationBundle, run: IRun): string {
  const steps = trans.__('step %1 of %2', run.step.toLocaleString(), run.steps.toLocaleString());
  return run.loss === null || run.loss === undefined ? steps : `${steps}, ${trans.__('loss %1', lossText(run.loss))}`;
}

/** A loss with four significant digits. */
export function lossText(loss: number): string {
  return Number(loss).toPrecision(4);
}
