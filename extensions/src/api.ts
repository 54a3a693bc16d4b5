import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

/** A lab: engines that run what they are given. */
export interface ILab {
  id: string;
  state: 'queued' | 'starting' | 'ready' | 'failed' | 'ended';
  engines: number;
  ready: number;
  /** Also of a lab whose state is `ended`: its keeper died, and something of it may be left. */
  reason: string;
  /** Keys of its runs below the server's root, oldest first. */
  runs: string[];
  /** How many of its runs are elsewhere. */
  outside: number;
}

/** One rank of a run. */
export interface IRank {
  rank: number;
  role: string;
  engine: number | null;
  pid: number;
  host: string;
  /** null: on another host, which cannot be told from here. */
  alive: boolean | null;
  phase: string;
  step: number;
}

/** A run, as it stands in a list. */
export interface IRun {
  /** Its folder below the server's root. */
  key: string;
  id: string;
  /** Seconds since the epoch. */
  created: number;
  lab: string;
  state: string;
  reason: string;
  step: number;
  steps: number;
  loss: number | null;
  generation: number;
}

/** What became of a command. */
export interface IAck {
  ok: boolean;
  step: number;
  ranks: number[];
  message: string;
}

/** A run with its ranks and its curve. */
export interface IRunDetails extends IRun {
  doing: string;
  ranks: IRank[];
  curve: [number, number][];
  /** Of the command that was asked about; null: not yet. */
  ack?: IAck | null;
}

/** All that lives here. */
export interface IOverview {
  allow_control: boolean;
  root: string;
  /** What is wrong with the root. */
  problem: string;
  labs: ILab[];
  runs: IRun[];
}

/** A command on its way. */
export interface ISent {
  verb: Verb;
  id: string;
}

export type Verb = 'pause' | 'resume' | 'step' | 'checkpoint' | 'stop' | 'abort';

const ENDED = ['failed', 'finished', 'stopped', 'unreadable'];

/** Whether a run computes no longer. */
export function hasEnded(run: IRun): boolean {
  return ENDED.includes(run.state);
}

/** How a lab was closed: by its keeper, past a keeper that does not answer, or what a dead one had left. */
export type How = 'closed' | 'forced' | 'remains';

/** The server said no, in a sentence; `status` 0: it could not be asked. */
export class Refusal extends Error {
  constructor(message: string, readonly status: number) {
    super(message);
  }
}

/** Whether what was asked about is not there; of the overview, which always is: whether the route is not. */
export function isGone(error: unknown): boolean {
  return error instanceof Refusal && error.status === 404;
}

/** Milliseconds after which an answer to a look, and to an action, is no longer waited for: a poll that waits for one
 * that a proxy has lost would never ask again. */
const LOOKED = 30000;
const ACTED = 120000;

/** What went wrong, for a person. */
export function reasonOf(error: unknown): string {
  return String(error instanceof Error ? error.message : error);
}

/** The routes of `mmlab.server`: the same authentication as every other request of the page. */
export class Api {
  constructor(private readonly settings: ServerConnection.ISettings) {}

  overview(): Promise<IOverview> {
    return this.ask('GET', 'overview');
  }

  run(key: string, command = ''): Promise<IRunDetails> {
    const query = command ? `?command=${encodeURIComponent(command)}` : '';
    return this.ask('GET', `runs/${quoted(key)}${query}`);
  }

  command(key: string, verb: Verb, args: Record<string, unknown> = {}): Promise<ISent> {
    return this.ask('POST', `runs/${quoted(key)}/${verb}`, args);
  }

  startLab(engines: number): Promise<ILab> {
    return this.ask('POST', 'labs', { engines });
  }

  /** More engines for a lab, `engines` in all. */
  growLab(id: string, engines: number): Promise<ILab> {
    return this.ask('POST', `labs/${id}/grow`, { engines });
  }

  async closeLab(id: string): Promise<How> {
    return (await this.ask<{ how: How }>('POST', `labs/${id}/close`, {})).how;
  }

  /** The path of the quickstart notebook, which is copied where it is not there. */
  async notebook(): Promise<string> {
    return (await this.ask<{ path: string }>('POST', 'notebook', {})).path;
  }

  private async ask<T>(method: string, path: string, body?: unknown): Promise<T> {
    const url = URLExt.join(this.settings.baseUrl, 'mmlab') + '/' + path;
    const signal = AbortSignal.timeout(method === 'GET' ? LOOKED : ACTED);
    const init = { method, signal, body: body === undefined ? undefined : JSON.stringify(body) };
    let response: Response;
    try {
      response = await ServerConnection.makeRequest(url, init, this.settings);
    } catch (error) {
      throw new Refusal(reasonOf(error), 0);
    }
    if (!response.ok) {
      const said = await response.json().catch(() => ({}));
      throw new Refusal(String(said.message || response.statusText), response.status);
    }
    return response.json() as Promise<T>;
  }
}

function quoted(key: string): string {
  return key.split('/').map(encodeURIComponent).join('/');
}
