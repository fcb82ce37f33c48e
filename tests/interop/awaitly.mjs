// The same checkout as in checkout.py, run by the real awaitly on a minimal store.
// node awaitly.mjs '{"modules": …, "kind": "postgres" | "mongo" | "libsql", "url": …, "id": …, "log": …}'
import { appendFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const plan = JSON.parse(process.argv[2]);
// Installed in a directory where `import` does not search.
const load = createRequire(plan.modules + '/');
const { durable } = load('awaitly/durable');
const { err, ok } = load('awaitly');

async function postgres() {
  const client = new (load('pg').Client)(plan.url);
  await client.connect();
  await client.query(`CREATE TABLE IF NOT EXISTS awaitly_snapshots (
    id TEXT PRIMARY KEY, snapshot JSONB NOT NULL, updated_at TIMESTAMPTZ DEFAULT NOW())`);
  return {
    save: (id, snapshot) => client.query(
      `INSERT INTO awaitly_snapshots (id, snapshot) VALUES ($1, $2)
       ON CONFLICT (id) DO UPDATE SET snapshot = excluded.snapshot, updated_at = NOW()`,
      [id, JSON.stringify(snapshot)]),
    load: async (id) => (await client.query(
      'SELECT snapshot FROM awaitly_snapshots WHERE id = $1', [id])).rows[0]?.snapshot ?? null,
    delete: (id) => client.query('DELETE FROM awaitly_snapshots WHERE id = $1', [id]),
    list: async () => [],
    close: () => client.end(),
  };
}

async function mongo() {
  const client = new (load('mongodb').MongoClient)(plan.url);
  const runs = client.db().collection('awaitly_snapshots');
  return {
    save: (id, snapshot) => runs.updateOne(
      { _id: id }, { $set: { snapshot, updatedAt: new Date() } }, { upsert: true }),
    load: async (id) => (await runs.findOne({ _id: id }))?.snapshot ?? null,
    delete: (id) => runs.deleteOne({ _id: id }),
    list: async () => [],
    close: () => client.close(),
  };
}

async function libsql() {
  const { DatabaseSync } = await import('node:sqlite');
  const file = new DatabaseSync(plan.url.replace('file:', ''));
  file.exec(`CREATE TABLE IF NOT EXISTS awaitly_snapshots (
    id TEXT PRIMARY KEY, snapshot TEXT NOT NULL, updated_at TEXT DEFAULT (datetime('now')))`);
  return {
    save: async (id, snapshot) => file.prepare(
      `INSERT INTO awaitly_snapshots (id, snapshot, updated_at) VALUES (?, ?, datetime('now'))
       ON CONFLICT (id) DO UPDATE SET snapshot = excluded.snapshot, updated_at = datetime('now')`,
    ).run(id, JSON.stringify(snapshot)),
    load: async (id) => {
      const row = file.prepare('SELECT snapshot FROM awaitly_snapshots WHERE id = ?').get(id);
      return row ? JSON.parse(row.snapshot) : null;
    },
    delete: async (id) => file.prepare('DELETE FROM awaitly_snapshots WHERE id = ?').run(id),
    list: async () => [],
    close: async () => file.close(),
  };
}

function effect(name) {
  if (plan.crashIn === name) process.exit(9);
  appendFileSync(plan.log, `node ${name}\n`);
}

const deps = {
  fetchUser: async (id) => { effect('user'); return ok({ id, name: 'Åsa ☃', 'a.b': { c: null } }); },
  quote: async () => { effect('quote'); return ok([12.5, 2 ** 53 - 1, -3, 1.5e-7, true, '', []]); },
  reserve: async () => {
    effect('reserve');
    const why = new TypeError('no row', { cause: { shelf: 7 } });
    return err({ type: 'OUT_OF_STOCK', left: 0 }, { cause: why });
  },
  charge: async (user) => { effect('charge'); return ok(`paid by ${user.name}`); },
};

async function checkout({ step, deps }) {
  const user = await step('fetch-user', () => deps.fetchUser('u-1'), { key: 'user:u-1' });
  const quote = await step('quote', () => deps.quote());
  if (plan.reserve) await step('reserve', () => deps.reserve());
  const paid = await step('charge', () => deps.charge(user));
  return { user, quote, paid };
}

const described = (cause) => cause instanceof Error
  ? { name: cause.name, message: cause.message, cause: described(cause.cause) }
  : cause;

const store = await { postgres, mongo, libsql }[plan.kind]();
const result = await durable.run(deps, checkout, { id: plan.id, store, metadata: { by: 'node' } });
await store.close();
console.log(JSON.stringify(result.ok ? result : { ...result, cause: described(result.cause) }));
