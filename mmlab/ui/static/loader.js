/* All that a view carries: it gets the shared script from the model that holds it, once for each page. */
const modules = (globalThis.mmlabModules ??= new Map());

async function load(model) {
  const id = model.get("code");
  const shared = await model.widget_manager.get_model(id);
  if (!modules.has(id)) {
    const url = URL.createObjectURL(new Blob([shared.get("script")], { type: "text/javascript" }));
    modules.set(id, import(url));
  }
  return [await modules.get(id), shared.get("style")];
}

export default () => {
  let loaded;
  let store;
  return {
    async initialize({ model }) {
      loaded = load(model);
      store = loaded.then(([module]) => new module.Store(model));
      return () => store.then((each) => each.dispose());
    },
    async render({ el }) {
      const [module, style] = await loaded;
      return module.mount(await store, el, style);
    },
  };
};
