// This browser's database, part of the images' script. Tabs can agree in it, because its changes happen one after the other;
// localStorage can show two tabs of one browser different values for a moment.
const STORES = { drops: { autoIncrement: true }, shared: {} };
function database() {
  return new Promise((done, failed) => {
    const request = indexedDB.open("hangproof", 2);
    request.onupgradeneeded = () => {
      const { result: db } = request;
      for (const [name, options] of Object.entries(STORES)) {
        if (!db.objectStoreNames.contains(name)) db.createObjectStore(name, options);
      }
    };
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error);
  });
}
async function inStore(name, act) {
  const db = await database();
  try {
    return await new Promise((done, failed) => {
      const change = db.transaction(name, "readwrite");
      const result = act(change.objectStore(name));
      change.oncomplete = () => done(result);
      change.onabort = () => failed(change.error);
    });
  } finally {
    db.close();
  }
}
/** The value of a key for all tabs of this browser: the first tab's `proposal`. */
async function agree(key, proposal) {
  const found = await inStore("shared", (store) => {
    const request = store.get(key);
    request.onsuccess = () => request.result === undefined && store.put(proposal, key);
    return request;
  });
  return found.result ?? proposal;
}
