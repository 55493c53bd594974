// The official JavaScript client against the cluster of KUBECONFIG.
import assert from 'node:assert/strict';
import { randomBytes } from 'node:crypto';
import { after, before, test } from 'node:test';
import * as k8s from '@kubernetes/client-node';

const config = new k8s.KubeConfig();
config.loadFromDefault();
const core = config.makeApiClient(k8s.CoreV1Api);
const apps = config.makeApiClient(k8s.AppsV1Api);
const objects = k8s.KubernetesObjectApi.makeApiClient(config);
const namespace = `javascript-${randomBytes(4).toString('hex')}`;

before(() => core.createNamespace({ body: { metadata: { name: namespace } } }));
after(() => core.deleteNamespace({ name: namespace }));

const configMap = (name, data = { a: '1' }, labels = {}) => ({
  apiVersion: 'v1', kind: 'ConfigMap', metadata: { name, namespace, labels }, data,
});
const refused = (code, reason) => (error) => {
  assert.equal(error.code, code);
  assert.equal(JSON.parse(error.body).reason, reason);
  return true;
};

test('create, read, replace, delete', async () => {
  const made = await core.createNamespacedConfigMap({ namespace, body: configMap('one') });
  assert.ok(made.metadata.uid);
  await assert.rejects(core.createNamespacedConfigMap({ namespace, body: configMap('one') }), refused(409, 'AlreadyExists'));
  const newer = await core.replaceNamespacedConfigMap({ name: 'one', namespace, body: { ...made, data: { a: '2' } } });
  assert.equal(newer.data.a, '2');
  await assert.rejects(
    core.replaceNamespacedConfigMap({ name: 'one', namespace, body: { ...made, data: { a: '3' } } }),
    refused(409, 'Conflict'),
  );
  await core.deleteNamespacedConfigMap({ name: 'one', namespace });
  await assert.rejects(core.readNamespacedConfigMap({ name: 'one', namespace }), refused(404, 'NotFound'));
});

test('lists by selector and by page', async () => {
  for (let i = 0; i < 5; i++) {
    await core.createNamespacedConfigMap({ namespace, body: configMap(`m${i}`, {}, { even: String(i % 2 === 0) }) });
  }
  const even = await core.listNamespacedConfigMap({ namespace, labelSelector: 'even=true' });
  assert.deepEqual(even.items.map((item) => item.metadata.name), ['m0', 'm2', 'm4']);
  const names = [];
  let token;
  do {
    const page = await core.listNamespacedConfigMap({ namespace, limit: 2, labelSelector: 'even', _continue: token });
    names.push(...page.items.map((item) => item.metadata.name));
    token = page.metadata._continue;
  } while (token);
  assert.deepEqual(names, ['m0', 'm1', 'm2', 'm3', 'm4']);
});

test('watch', async () => {
  const list = await core.listNamespacedConfigMap({ namespace });
  const seen = [];
  await new Promise((resolve, reject) => {
    const query = { resourceVersion: list.metadata.resourceVersion, labelSelector: 'w=1' };
    const started = new k8s.Watch(config).watch(
      `/api/v1/namespaces/${namespace}/configmaps`, query,
      (type) => { seen.push(type); if (type === 'DELETED') started.then((c) => { c.abort(); resolve(); }); },
      (error) => (seen.length === 3 ? resolve() : reject(error ?? new Error('the watch ended'))),
    );
    started.then(async () => {
      await core.createNamespacedConfigMap({ namespace, body: configMap('w', {}, { w: '1' }) });
      await objects.patch({ ...configMap('w'), metadata: { name: 'w', namespace } }, undefined, undefined, undefined, undefined,
        k8s.PatchStrategy.MergePatch);
      await core.deleteNamespacedConfigMap({ name: 'w', namespace });
    }).catch(reject);
  });
  assert.deepEqual(seen, ['ADDED', 'MODIFIED', 'DELETED']);
});

test('an informer follows', async () => {
  const list = () => core.listNamespacedConfigMap({ namespace, labelSelector: 'i=1' });
  const informer = k8s.makeInformer(config, `/api/v1/namespaces/${namespace}/configmaps`, list, 'i=1');
  const added = new Promise((resolve) => informer.on('add', (object) => resolve(object.metadata.name)));
  await informer.start();
  await core.createNamespacedConfigMap({ namespace, body: configMap('i', {}, { i: '1' }) });
  assert.equal(await added, 'i');
  await informer.stop();
});

test('server-side apply', async () => {
  const apply = (manager, data, force) => objects.patch(
    { apiVersion: 'v1', kind: 'ConfigMap', metadata: { name: 'ssa', namespace }, data },
    undefined, undefined, manager, force, k8s.PatchStrategy.ServerSideApply,
  );
  await apply('one', { a: '1', b: '1' });
  assert.deepEqual((await apply('two', { c: '1' })).data, { a: '1', b: '1', c: '1' });
  await assert.rejects(apply('two', { c: '1', a: '2' }), refused(409, 'Conflict'));
  assert.equal((await apply('two', { c: '1', a: '2' }, true)).data.a, '2');
});

test('a deployment scales', async () => {
  const labels = { app: 'web' };
  const template = { metadata: { labels }, spec: { containers: [{ name: 'web', image: 'example.invalid/web:1' }] } };
  await apps.createNamespacedDeployment({
    namespace, body: { metadata: { name: 'web' }, spec: { replicas: 0, selector: { matchLabels: labels }, template } },
  });
  const scale = await apps.readNamespacedDeploymentScale({ name: 'web', namespace });
  assert.equal(scale.status.selector, 'app=web');
  // Without a version: the deployment controller writes at the same time.
  const body = { ...scale, metadata: { name: 'web', namespace }, spec: { replicas: 2 } };
  await apps.replaceNamespacedDeploymentScale({ name: 'web', namespace, body });
  assert.equal((await apps.readNamespacedDeployment({ name: 'web', namespace })).spec.replicas, 2);
});
