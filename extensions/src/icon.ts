import { LabIcon } from '@jupyterlab/ui-components';

/** Ranks that talk to each other. */
export const icon = new LabIcon({
  name: 'mmlab:ranks',
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <g class="jp-icon3" fill="#616161">
    <circle cx="5" cy="6" r="3"/><circle cx="19" cy="6" r="3"/><circle cx="12" cy="18.5" r="3"/>
    <path d="M8 5.2h8v1.6H8zM6.1 8.9l1.4-.8 3.6 6.3-1.4.8zM16.5 8.1l1.4.8-3.6 6.3-1.4-.8z"/>
  </g></svg>`
});
