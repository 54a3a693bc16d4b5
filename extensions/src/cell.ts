/** Milliseconds that a kernel may be busy with, as by a view's message, and that it may take to start. */
const MOMENT = 3000;
const STARTING = 30000;
const LOOK = 100;

/** What is used of a notebook's widget; `@jupyterlab/notebook` itself would bring 165 MB of build dependencies. */
export interface INotebookLike {
  context?: { ready: Promise<void> };
  sessionContext?: { isReady: boolean; session: { kernel: { status: string } | null } | null };
  content?: { activeCell?: ICellLike | null; widgets?: readonly ICellLike[] };
}

interface ICellLike {
  model: {
    /** `running` also while others, such as a view's messages in a subshell, make the kernel call itself idle. */
    executionState?: string;
    sharedModel: { source: string; execution_count?: number | null; setSource(text: string): void };
  };
}

/** What is used of JupyterLab's commands. */
export interface ICommands {
  execute(id: string): Promise<unknown>;
}

/** A cell that was written into a notebook by a button. */
export class Cell {
  private readonly cell: ICellLike | null;
  /** The count of its last run before: a cell that was emptied keeps it. */
  private readonly before: number | null | undefined;

  constructor(
    private readonly panel: INotebookLike,
    private readonly text: string,
    private readonly commands: ICommands,
    private readonly inFront: () => boolean
  ) {
    this.cell = panel.content?.activeCell ?? null;
    this.before = this.cell?.model.sharedModel.execution_count;
    this.cell?.model.sharedModel.setSource(text);
  }

  /** Whether somebody has run it. */
  get ran(): boolean {
    const count = this.cell?.model.sharedModel.execution_count;
    return typeof count === 'number' && count !== this.before;
  }

  /**
   * Run it as soon as its kernel is idle. Else why not: the kernel is `busy`, there is `none`, or somebody went `on`
   * to another cell meanwhile. What waits behind a cell of another hour would start when nobody expects it.
   */
  async run(): Promise<'' | 'busy' | 'none' | 'on'> {
    const began = Date.now();
    for (;;) {
      const known = this.panel.sessionContext;
      const runs = this.panel.content?.widgets?.some(cell => cell.model.executionState === 'running');
      const said = known?.session?.kernel?.status ?? (known?.isReady ? 'none' : 'starting');
      const status = runs && said === 'idle' ? 'busy' : said;
      const passed = Date.now() - began;
      if (status === 'idle') {
        break;
      }
      if (status === 'none' || status === 'dead' || status === 'terminating') {
        return 'none';
      }
      if (passed > (status === 'busy' ? MOMENT : STARTING)) {
        return 'busy';
      }
      await new Promise(resolve => setTimeout(resolve, LOOK));
    }
    const own = this.panel.content?.activeCell === this.cell && this.cell?.model.sharedModel.source === this.text;
    if (!own || !this.inFront()) {
      return 'on';
    }
    void this.commands.execute('notebook:run-cell').catch(() => undefined); // the cell shows what went wrong
    return '';
  }
}
