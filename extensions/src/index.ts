import { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';

const plugin: JupyterFrontEndPlugin<void> = {
  id: 'mmlab:sidebar',
  description: 'Labs, runs and ranks of mmlab.',
  autoStart: true,
  activate: (_app: JupyterFrontEnd) => {
    console.log('mmlab');
  }
};

export default plugin;
