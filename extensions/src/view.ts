import { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import { nullTranslator } from '@jupyterlab/translation';
import { Message } from '@lumino/messaging';
import { Panel, Widget } from '@lumino/widgets';

/** Stands in each bundle of mmlab that has a live view; see `Part.bundle` in `mmlab/ui/part.py`. */
const MIME = 'application/vnd.mmlab.view+json';
const WIDGET = 'application/vnd.jupyter.widget-view+json';
/** Milliseconds for which a live view may take to come before the picture is shown. */
const PATIENCE = 1500;
/** Milliseconds between looks whether the notebook has got its manager of widgets. */
const LOOK = 500;

/** What is used of a notebook's registry of renderers (`@jupyterlab/rendermime`). */
interface IRegistry {
  getFactory(mimeType: string): IRenderMime.IRendererFactory | undefined;
  preferredMimeType(bundle: object, safe: 'ensure' | 'any'): string | undefined;
  createRenderer(mimeType: string): IRenderMime.IRenderer;
}

/** ipywidgets' renderer: it has a child once the kernel has given the view. */
type Live = IRenderMime.IRenderer & Panel;

/**
 * A view whose kernel has it, live; else the picture of it that the output holds.
 *
 * JupyterLab prefers a live view whether there is one or not: after the kernel's death its renderer has nothing to say
 * but "model not found". This one stands before it, asks it for the view, and shows the picture as long as it has none.
 */
class ViewRenderer extends Panel implements IRenderMime.IRenderer {
  constructor(private readonly _options: IRenderMime.IRendererOptions) {
    super();
    this.addClass('mmlab-outlives');
    this._seen = new MutationObserver(() => this._settle());
  }

  /** Take a bundle, also one that replaces another: of the same view only the picture is taken. */
  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    const before = this._id;
    this._model = model;
    if (!this.isAttached) {
      return; // what renders the view and the picture is known by the place where this one stands
    }
    if (this._id !== before) {
      this._began = Date.now();
      this._begin();
    }
    this._still?.dispose();
    this._still = null;
    this._settle();
  }

  protected onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    this._registry = registryAround(this);
    this._began = Date.now();
    this._timer = window.setInterval(() => this._look(), LOOK);
    this._look();
  }

  protected onBeforeDetach(message: Message): void {
    window.clearInterval(this._timer);
    super.onBeforeDetach(message);
  }

  dispose(): void {
    this._seen.disconnect();
    super.dispose();
  }

  private get _id(): unknown {
    return (this._model?.data[WIDGET] as { model_id?: string } | undefined)?.model_id;
  }

  /** A notebook gets its manager of widgets when its kernel is ready: the factory is then another one. */
  private _look(): void {
    if (this._registry?.getFactory(WIDGET) !== this._factory) {
      this._begin();
    }
    this._settle();
  }

  /** Ask for the live view. */
  private _begin(): void {
    this._seen.disconnect();
    this._live?.dispose();
    this._live = null;
    this._factory = this._registry?.getFactory(WIDGET);
    this._refused = !this._factory || !this._model;
    if (this._refused || !this._registry || !this._model) {
      return;
    }
    const live = this._registry.createRenderer(WIDGET) as Live;
    this._live = live;
    this.addWidget(live);
    this._seen.observe(live.node, { childList: true, attributes: true, attributeFilter: ['class'] });
    const refuse = () => {
      if (this._live === live) {
        this._refused = live.widgets.length === 0;
        this._settle();
      }
    };
    live.renderModel(this._model).then(refuse, refuse);
  }

  /** Show the live view where there is one, the picture where there is none or it does not come. */
  private _settle(): void {
    if (this.isDisposed || !this.isAttached || !this._model) {
      return;
    }
    const lives = !!this._live && this._live.widgets.length > 0 && !this._live.isHidden;
    const still = !lives && (this._refused || Date.now() - this._began > PATIENCE);
    if (this._live) {
      this._live.node.style.display = still ? 'none' : '';
    }
    if (still && !this._still) {
      this._still = this._picture(this._model);
      this.insertWidget(0, this._still);
    } else if (!still) {
      this._still?.dispose();
      this._still = null;
    }
  }

  /** The richest of what else the output holds. */
  private _picture(model: IRenderMime.IMimeModel): Widget {
    const panel = new Panel();
    const trans = (this._options.translator ?? nullTranslator).load('mmlab');
    const note = new Widget({ node: document.createElement('p') });
    note.addClass('mmlab-outlives-note');
    note.node.setAttribute('role', 'status');
    note.node.textContent = trans.__(
      'This is how it stood last: no kernel has the live view. Run the cell to see it live again.'
    );
    panel.addWidget(note);
    const { [MIME]: _, [WIDGET]: __, ...others } = model.data;
    const best = this._registry?.preferredMimeType(others, model.trusted ? 'any' : 'ensure');
    if (best && this._registry) {
      const renderer = this._registry.createRenderer(best);
      void renderer.renderModel(model);
      panel.addWidget(renderer);
    }
    return panel;
  }

  private _model: IRenderMime.IMimeModel | null = null;
  private _registry: IRegistry | null = null;
  private _factory: IRenderMime.IRendererFactory | undefined;
  private _live: Live | null = null;
  private _still: Widget | null = null;
  private _refused = false;
  private _began = 0;
  private _timer = 0;
  private readonly _seen: MutationObserver;
}

/** The registry of the notebook, console or copied output around a widget; only they know which manager is theirs. */
function registryAround(widget: Widget): IRegistry | null {
  for (let around = widget.parent; around; around = around.parent) {
    if ('rendermime' in around) {
      return around.rendermime as IRegistry;
    }
  }
  return null;
}

const extension: IRenderMime.IExtension = {
  id: 'mmlab:view',
  description: 'Live views of mmlab, with their last picture where no kernel has them.',
  rendererFactory: {
    safe: false,
    mimeTypes: [MIME],
    createRenderer: options => new ViewRenderer(options)
  },
  rank: -20, // before ipywidgets' -10
  dataType: 'json'
};

export default extension;
