/* All that a view carries: it gets the shared script from the model that holds it, once for each page. */
const modules = (globalThis.mmlabModules ??= new Map());

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function importPacked(base64) {
  const url = URL.createObjectURL(new Blob([await unpack(base64)], { type: "text/javascript" }));
  return import(url).finally(() => URL.revokeObjectURL(url));
}

async function load(model) {
  const id = model.get("code");
  const shared = await model.widget_manager.get_model(id);
  if (!modules.has(id)) modules.set(id, importPacked(shared.get("packed")));
  return modules.get(id);
}

export default () => {
  let loaded;
  let store;
  return {
    async initialize({ model }) {
      loaded = load(model);
      store = loaded.then((module) => new module.Store(model));
      return () => store.then((each) => each.dispose());
    },
    async render({ el }) {
      const module = await loaded;
      return module.mount(await store, el);
    },
  };
};
