"""The official Python client against the cluster of KUBECONFIG."""

import unittest
import uuid

from kubernetes import client, config, dynamic, watch
from kubernetes.client.rest import ApiException

config.load_kube_config()
core = client.CoreV1Api()
apps = client.AppsV1Api()


def config_map(name, data=None, labels=None):
    return client.V1ConfigMap(metadata=client.V1ObjectMeta(name=name, labels=labels), data=data or {"a": "1"})


class Flows(unittest.TestCase):
    def setUp(self):
        self.namespace = "python-" + uuid.uuid4().hex[:8]
        core.create_namespace(client.V1Namespace(metadata=client.V1ObjectMeta(name=self.namespace)))
        self.addCleanup(core.delete_namespace, self.namespace)

    def refused(self, status, reason, call, *args, **kwargs):
        with self.assertRaises(ApiException) as caught:
            call(*args, **kwargs)
        self.assertEqual(caught.exception.status, status)
        self.assertIn(f'"reason":"{reason}"', caught.exception.body)

    def test_create_read_replace_delete(self):
        made = core.create_namespaced_config_map(self.namespace, config_map("one"))
        self.assertTrue(made.metadata.uid)
        self.refused(409, "AlreadyExists", core.create_namespaced_config_map, self.namespace, config_map("one"))
        made.data["a"] = "2"
        newer = core.replace_namespaced_config_map("one", self.namespace, made)
        self.assertEqual(newer.data, {"a": "2"})
        made.data["a"] = "3"
        self.refused(409, "Conflict", core.replace_namespaced_config_map, "one", self.namespace, made)
        core.delete_namespaced_config_map("one", self.namespace)
        self.refused(404, "NotFound", core.read_namespaced_config_map, "one", self.namespace)

    def test_invalid_object(self):
        self.refused(422, "Invalid", core.create_namespaced_config_map, self.namespace, config_map("No_Name"))

    def test_lists(self):
        for i in range(5):
            core.create_namespaced_config_map(self.namespace, config_map(f"m{i}", labels={"even": str(i % 2 == 0)}))
        even = core.list_namespaced_config_map(self.namespace, label_selector="even=True")
        self.assertEqual([item.metadata.name for item in even.items], ["m0", "m2", "m4"])
        one = core.list_namespaced_config_map(self.namespace, field_selector="metadata.name=m3")
        self.assertEqual(len(one.items), 1)
        names, token = [], None
        while token != "":
            page = core.list_namespaced_config_map(self.namespace, limit=2, _continue=token, label_selector="even")
            names += [item.metadata.name for item in page.items]
            token = page.metadata._continue or ""
        self.assertEqual(names, [f"m{i}" for i in range(5)])

    def test_watch_and_resume(self):
        start = core.list_namespaced_config_map(self.namespace).metadata.resource_version
        core.create_namespaced_config_map(self.namespace, config_map("w", labels={"w": "1"}))
        core.patch_namespaced_config_map("w", self.namespace, {"data": {"a": "2"}})
        core.delete_namespaced_config_map("w", self.namespace)
        seen, versions = [], []
        stream = watch.Watch()
        options = {"label_selector": "w=1", "timeout_seconds": 30}
        for event in stream.stream(core.list_namespaced_config_map, self.namespace, resource_version=start, **options):
            seen.append(event["type"])
            versions.append(event["object"].metadata.resource_version)
            if event["type"] == "DELETED":
                stream.stop()
        self.assertEqual(seen, ["ADDED", "MODIFIED", "DELETED"])
        stream = watch.Watch()
        for event in stream.stream(core.list_namespaced_config_map, self.namespace, resource_version=versions[1], **options):
            self.assertEqual(event["type"], "DELETED")
            stream.stop()

    def test_server_side_apply(self):
        dyn = dynamic.DynamicClient(client.ApiClient())
        maps = dyn.resources.get(api_version="v1", kind="ConfigMap")

        def apply(manager, data, force=False):
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "ssa"}, "data": data}
            return dyn.server_side_apply(
                maps, body=body, name="ssa", namespace=self.namespace, field_manager=manager, force_conflicts=force
            )

        apply("one", {"a": "1", "b": "1"})
        both = apply("two", {"c": "1"})
        self.assertEqual(dict(both.data), {"a": "1", "b": "1", "c": "1"})
        with self.assertRaises(ApiException) as caught:
            apply("two", {"c": "1", "a": "2"})
        self.assertEqual(caught.exception.status, 409)
        self.assertIn('conflict with \\"one\\"', caught.exception.body)
        taken = apply("two", {"c": "1", "a": "2"}, force=True)
        self.assertEqual(taken.data["a"], "2")
        gone = apply("one", {})
        self.assertEqual(dict(gone.data), {"a": "2", "c": "1"})

    def test_deployment_scales(self):
        labels = {"app": "web"}
        container = client.V1Container(name="web", image="example.invalid/web:1")
        template = client.V1PodTemplateSpec(
            metadata=client.V1ObjectMeta(labels=labels), spec=client.V1PodSpec(containers=[container])
        )
        spec = client.V1DeploymentSpec(
            replicas=0, selector=client.V1LabelSelector(match_labels=labels), template=template
        )
        apps.create_namespaced_deployment(
            self.namespace, client.V1Deployment(metadata=client.V1ObjectMeta(name="web"), spec=spec)
        )
        scale = apps.read_namespaced_deployment_scale("web", self.namespace)
        self.assertEqual((scale.spec.replicas or 0, scale.status.selector), (0, "app=web"))
        apps.patch_namespaced_deployment_scale("web", self.namespace, {"spec": {"replicas": 2}})
        self.assertEqual(apps.read_namespaced_deployment("web", self.namespace).spec.replicas, 2)

    def test_custom_resource(self):
        group = "python-" + uuid.uuid4().hex[:6] + ".example.com"
        schema = {
            "type": "object",
            "properties": {
                "spec": {
                    "type": "object",
                    "properties": {"size": {"type": "integer", "default": 3, "maximum": 9}},
                }
            },
        }
        crds = client.ApiextensionsV1Api()
        crds.create_custom_resource_definition(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": "boats." + group},
                "spec": {
                    "group": group,
                    "scope": "Namespaced",
                    "names": {"plural": "boats", "singular": "boat", "kind": "Boat", "listKind": "BoatList"},
                    "versions": [
                        {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
                    ],
                },
            }
        )
        self.addCleanup(crds.delete_custom_resource_definition, "boats." + group)
        for event in watch.Watch().stream(
            crds.list_custom_resource_definition, field_selector="metadata.name=boats." + group, timeout_seconds=30
        ):
            conditions = event["object"].status.conditions or []
            if any(c.type == "Established" and c.status == "True" for c in conditions):
                break
        else:
            self.fail("the definition was not established")
        objects = client.CustomObjectsApi()
        at = (group, "v1", self.namespace, "boats")
        boat = {"apiVersion": group + "/v1", "kind": "Boat", "metadata": {"name": "skiff"}, "spec": {"oars": 2}}
        made = objects.create_namespaced_custom_object(*at, boat)
        self.assertEqual(made["spec"], {"size": 3})
        objects.patch_namespaced_custom_object(*at, "skiff", {"spec": {"size": 5}})
        self.assertEqual(objects.get_namespaced_custom_object(*at, "skiff")["spec"]["size"], 5)
        self.refused(
            422, "Invalid", objects.patch_namespaced_custom_object, *at, "skiff", {"spec": {"size": 10}}
        )
        objects.delete_namespaced_custom_object(*at, "skiff")
        self.assertEqual(objects.list_namespaced_custom_object(*at)["items"], [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
