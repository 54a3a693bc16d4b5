type Props = Record<string, string | boolean | ((event: Event) => void) | null | undefined>;

/** An element; functions become listeners, `true` an empty attribute, false, null and undefined none. */
export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === 'function') {
      made.addEventListener(name, value);
    } else if (value === true) {
      made.setAttribute(name, '');
    } else if (typeof value === 'string') {
      made.setAttribute(name, value);
    }
  }
  made.append(...children);
  return made;
}

/** Set an element's text where it differs, so that selections and screen readers are left in peace. */
export function put(element: Element, text: string): void {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** An element that shows one item, made once and updated in place: what has the focus keeps it. */
export interface IRow<T> {
  node: HTMLElement;
  update(item: T): void;
}

/** Rows of a list by key. */
export class Rows<T> {
  private rows = new Map<string, IRow<T>>();

  constructor(
    private readonly place: HTMLElement,
    private readonly key: (item: T) => string,
    private readonly make: (item: T) => IRow<T>
  ) {}

  update(items: T[]): void {
    const kept = new Map<string, IRow<T>>();
    items.forEach((item, index) => {
      const key = this.key(item);
      const row = this.rows.get(key) ?? this.make(item);
      row.update(item);
      kept.set(key, row);
      if (this.place.children[index] !== row.node) {
        this.place.insertBefore(row.node, this.place.children[index] ?? null);
      }
    });
    this.rows.forEach((row, key) => {
      if (!kept.has(key)) {
        row.node.remove();
      }
    });
    this.rows = kept;
  }
}

const SVG = 'http://www.w3.org/2000/svg';
const WIDTH = 240;
const HEIGHT = 40;

/** A small curve without axes; a screen reader hears the text beside it. */
export class Sparkline {
  readonly node = document.createElementNS(SVG, 'svg');
  private readonly line = document.createElementNS(SVG, 'polyline');

  constructor() {
    this.node.setAttribute('viewBox', `0 0 ${WIDTH} ${HEIGHT}`);
    this.node.setAttribute('preserveAspectRatio', 'none');
    this.node.setAttribute('aria-hidden', 'true');
    this.node.classList.add('mmlab-curve');
    this.node.append(this.line);
  }

  update(points: [number, number][]): void {
    const known = points.filter(([, value]) => Number.isFinite(value));
    const xs = known.map(([step]) => step);
    const ys = known.map(([, value]) => value);
    const [left, low] = [Math.min(...xs), Math.min(...ys)];
    const across = Math.max(...xs) - left || 1;
    const up = Math.max(...ys) - low || 1;
    const place = ([step, value]: [number, number]) =>
      `${(((step - left) / across) * WIDTH).toFixed(1)},${(HEIGHT - 2 - ((value - low) / up) * (HEIGHT - 4)).toFixed(1)}`;
    this.line.setAttribute('points', known.map(place).join(' '));
  }
}
