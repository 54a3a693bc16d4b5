import { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';

import { el, put } from './dom';
import { Model } from './model';
import { lossText, stateWord } from './words';

/** State and loss of the active run in the status bar; a click shows the sidebar. */
export class StatusItem extends Widget {
  private readonly button: HTMLButtonElement;

  constructor(private readonly model: Model, private readonly trans: TranslationBundle, show: () => void) {
    super();
    this.addClass('mmlab-status');
    this.button = el('button', { type: 'button', click: show });
    this.node.append(this.button);
    model.changed.connect(this.renew, this);
    this.renew();
  }

  private renew(): void {
    const run = this.model.active;
    this.setHidden(run === null && this.model.labs.length === 0);
    if (this.model.trouble) {
      put(this.button, `mmlab: ${this.trans.__('no answer')}`);
      this.button.title = this.model.trouble.message;
      this.node.dataset.state = '';
      return;
    }
    const words = run ? [stateWord(this.trans, run.state), `${run.step}/${run.steps}`] : [this.trans.__('no run')];
    if (run && run.loss !== null && run.loss !== undefined) {
      words.push(this.trans.__('loss %1', lossText(run.loss)));
    }
    put(this.button, `mmlab: ${words.join(' · ')}`);
    this.button.title = run ? this.trans.__('%1: show the sidebar of mmlab', run.id) : '';
    this.node.dataset.state = run?.state ?? '';
  }
}
