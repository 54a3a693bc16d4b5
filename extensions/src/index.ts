import { ILayoutRestorer, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, Notification } from '@jupyterlab/apputils';
import { ILauncher } from '@jupyterlab/launcher';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator, TranslationBundle } from '@jupyterlab/translation';

import { Actions } from './actions';
import { Api, hasEnded, IRun } from './api';
import { Endings } from './endings';
import { icon } from './icon';
import { Model } from './model';
import { Sidebar } from './sidebar';
import { StatusItem } from './status';
import { progressText } from './words';

const CATEGORY = 'mmlab';
const ENOUGH = 10000;

/** Tell of the end of a run. */
function tell(trans: TranslationBundle, run: IRun, show: () => void): void {
  const actions = [{ label: trans.__('Show'), callback: show }];
  if (run.state === 'failed') {
    Notification.error(trans.__('Run %1 failed: %2', run.id, run.reason), { autoClose: false, actions });
  } else if (run.state === 'finished') {
    Notification.success(trans.__('Run %1 finished: %2', run.id, progressText(trans, run)), {
      autoClose: ENOUGH,
      actions
    });
  }
}

/** Commands for palette, launcher and shortcuts. */
function addCommands(app: JupyterFrontEnd, model: Model, actions: Actions, trans: TranslationBundle, show: () => void) {
  const live = () => (model.active && !hasEnded(model.active) ? model.active : null);
  const allowed = () => model.allowControl;
  const steer = (work: (run: IRun) => Promise<void>) => () => {
    const run = live();
    return run ? work(run) : Promise.resolve();
  };
  const steerable = () => allowed() && live() !== null;
  const known: [string, string, string, () => unknown, () => boolean][] = [
    ['mmlab:show', trans.__('Show Labs and Runs'), '', show, () => true],
    [
      'mmlab:open-quickstart',
      trans.__('Open the Quickstart Notebook'),
      trans.__('Quickstart'),
      () => actions.openQuickstart(),
      allowed
    ],
    ['mmlab:start-lab', trans.__('Start a Lab…'), trans.__('Start a lab'), () => actions.startLab(), allowed],
    [
      'mmlab:new-notebook',
      trans.__('New Notebook with a Run'),
      trans.__('New run'),
      () => actions.newNotebook(),
      () => true
    ],
    ['mmlab:pause-run', trans.__('Pause the Active Run'), '', steer(run => actions.steer(run, 'pause')), steerable],
    ['mmlab:resume-run', trans.__('Resume the Active Run'), '', steer(run => actions.steer(run, 'resume')), steerable],
    ['mmlab:stop-run', trans.__('Stop the Active Run'), '', steer(run => actions.steer(run, 'stop')), steerable],
    [
      'mmlab:emergency',
      trans.__('Emergency Stop of the Active Run…'),
      '',
      steer(run => actions.emergency.start(run)),
      steerable
    ]
  ];
  for (const [id, label, short, execute, isEnabled] of known) {
    app.commands.addCommand(id, {
      label: args => (args.launcher && short ? short : label),
      caption: label,
      icon: args => (args.isPalette ? undefined : icon),
      execute,
      isEnabled
    });
  }
  model.changed.connect(() => known.forEach(([id]) => app.commands.notifyCommandChanged(id)));
  return known.map(([id]) => id);
}

const plugin: JupyterFrontEndPlugin<void> = {
  id: 'mmlab:sidebar',
  description: 'Labs, runs and ranks of mmlab, and an emergency stop that needs no kernel.',
  autoStart: true,
  optional: [ITranslator, ICommandPalette, ILauncher, IStatusBar, ILayoutRestorer],
  activate: (
    app: JupyterFrontEnd,
    translator: ITranslator | null,
    palette: ICommandPalette | null,
    launcher: ILauncher | null,
    statusBar: IStatusBar | null,
    restorer: ILayoutRestorer | null
  ) => {
    const trans = (translator ?? nullTranslator).load('mmlab');
    const settings = app.serviceManager.serverSettings;
    const show = () => app.shell.activateById('mmlab-sidebar');
    const endings = new Endings(`mmlab:alive:${settings.baseUrl}`, run =>
      tell(trans, run, () => {
        model.choose(run.key);
        show();
      })
    );
    const model: Model = new Model(new Api(settings), endings);
    const actions = new Actions(app, model, trans);
    const sidebar = new Sidebar(model, actions, trans);
    app.shell.add(sidebar, 'left', { rank: 550 });
    restorer?.add(sidebar, 'mmlab-sidebar');

    const ids = addCommands(app, model, actions, trans, show);
    ids.forEach(command => palette?.addItem({ command, category: CATEGORY, args: { isPalette: true } }));
    ['mmlab:open-quickstart', 'mmlab:new-notebook', 'mmlab:start-lab'].forEach((command, rank) =>
      launcher?.add({ command, category: CATEGORY, rank, args: { launcher: true } })
    );
    statusBar?.registerStatusItem('mmlab:status', {
      item: new StatusItem(model, trans, show),
      align: 'middle',
      rank: 50
    });
    actions.listen((text, bad) => {
      if (text && bad && !sidebar.isVisible) {
        Notification.error(text, { autoClose: ENOUGH });
      } else if (text && !sidebar.isVisible) {
        Notification.info(text, { autoClose: 5000 });
      }
    });
  }
};

export default plugin;
