import { TranslationBundle } from '@jupyterlab/translation';

import { How, IRun, isGone, reasonOf, Refusal } from './api';

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

/** A command in the reader's language. */
export function verbWord(trans: TranslationBundle, verb: string): string {
  const words: Record<string, string> = {
    pause: trans.__('pause'),
    resume: trans.__('resume'),
    step: trans._p('command', 'step'),
    checkpoint: trans.__('checkpoint'),
    stop: trans.__('stop'),
    abort: trans.__('abort')
  };
  return words[verb] ?? verb;
}

/** What a rank does, in the reader's language. */
export function phaseWord(trans: TranslationBundle, phase: string): string {
  const words: Record<string, string> = {
    start: trans.__('start'),
    data: trans.__('data'),
    encode: trans.__('encode'),
    exchange: trans.__('exchange'),
    forward: trans.__('forward'),
    backward: trans.__('backward'),
    pipeline: trans.__('pipeline'),
    reduce: trans.__('reduce'),
    optimizer: trans.__('optimizer'),
    eval: trans.__('eval'),
    checkpoint: trans.__('checkpoint'),
    control: trans.__('control')
  };
  return words[phase] ?? phase;
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

/** Why the server shows nothing, and what to do. */
export function troubleText(trans: TranslationBundle, trouble: Refusal): string {
  if (isGone(trouble)) {
    return trans.__('The server does not have mmlab’s extension: jupyter server extension enable mmlab.server');
  }
  if (trouble.status === 401 || trouble.status === 403) {
    return trans.__('The server does not let this page in any longer: reload it and log in again.');
  }
  return trans.__('No answer from the server: %1. This page goes on asking.', trouble.message);
}

/** Why a run did not take a command. */
export function refusedText(trans: TranslationBundle, run: IRun, error: unknown): string {
  return isGone(error) ? trans.__('Run %1 is gone: its folder is not there any more.', run.id) : reasonOf(error);
}

/** How a lab was closed. */
export function closedText(trans: TranslationBundle, lab: string, how: How): string {
  const words: Record<How, string> = {
    closed: trans.__('Lab %1 is closed', lab),
    forced: trans.__('Lab %1 is closed: its keeper did not answer, so its processes were ended from here', lab),
    remains: trans.__('Lab %1 is closed: its keeper had died, and what was left of it was ended', lab)
  };
  return words[how] ?? words.closed;
}
