// Package clients runs client-go against the cluster of KUBECONFIG.
package clients

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

var contentTypes = map[string]string{
	"json":     "application/json",
	"protobuf": "application/vnd.kubernetes.protobuf",
}

func config(t *testing.T) *rest.Config {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// setup makes a client that speaks the given media type, and a namespace.
func setup(t *testing.T, contentType string) (context.Context, *kubernetes.Clientset, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	config := config(t)
	config.ContentType = contentType
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	namespace, err := client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "go-"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = client.CoreV1().Namespaces().Delete(context.Background(), namespace.Name, metav1.DeleteOptions{})
	})
	return ctx, client, namespace.Name
}

// each runs a test once a media type.
func each(t *testing.T, run func(t *testing.T, contentType string)) {
	for name, contentType := range contentTypes {
		t.Run(name, func(t *testing.T) { run(t, contentType) })
	}
}

func configMap(name string, labels map[string]string) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Data:       map[string]string{"a": "1"},
		BinaryData: map[string][]byte{"b": {0, 255, 1}},
	}
}

func TestCreateReadUpdateDelete(t *testing.T) {
	each(t, func(t *testing.T, contentType string) {
		ctx, client, namespace := setup(t, contentType)
		maps := client.CoreV1().ConfigMaps(namespace)
		made, err := maps.Create(ctx, configMap("one", nil), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(made.UID) == 0 || made.CreationTimestamp.IsZero() || len(made.BinaryData["b"]) != 3 {
			t.Fatalf("created: %+v", made)
		}
		if _, err := maps.Create(ctx, configMap("one", nil), metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
			t.Fatalf("second create: %v", err)
		}
		old := made.DeepCopy()
		made.Data["a"] = "2"
		if made, err = maps.Update(ctx, made, metav1.UpdateOptions{}); err != nil || made.Data["a"] != "2" {
			t.Fatalf("update: %v %v", made, err)
		}
		if _, err := maps.Update(ctx, old, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
			t.Fatalf("stale update: %v", err)
		}
		if _, err := maps.Create(ctx, configMap("No_Name", nil), metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
			t.Fatalf("invalid name: %v", err)
		}
		for kind, body := range map[types.PatchType]string{
			types.MergePatchType:          `{"data":{"m":"1"}}`,
			types.StrategicMergePatchType: `{"data":{"s":"1"}}`,
			types.JSONPatchType:           `[{"op":"add","path":"/data/j","value":"1"}]`,
		} {
			if made, err = maps.Patch(ctx, "one", kind, []byte(body), metav1.PatchOptions{}); err != nil {
				t.Fatalf("%s: %v", kind, err)
			}
		}
		if len(made.Data) != 4 {
			t.Fatalf("patched: %v", made.Data)
		}
		if err := maps.Delete(ctx, "one", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := maps.Get(ctx, "one", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Fatalf("deleted: %v", err)
		}
	})
}

func TestListsAndPages(t *testing.T) {
	each(t, func(t *testing.T, contentType string) {
		ctx, client, namespace := setup(t, contentType)
		maps := client.CoreV1().ConfigMaps(namespace)
		for i := range 5 {
			labels := map[string]string{"even": fmt.Sprint(i%2 == 0)}
			if _, err := maps.Create(ctx, configMap(fmt.Sprintf("m%d", i), labels), metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		even, err := maps.List(ctx, metav1.ListOptions{LabelSelector: "even=true"})
		if err != nil || len(even.Items) != 3 {
			t.Fatalf("selector: %d %v", len(even.Items), err)
		}
		var names []string
		options := metav1.ListOptions{Limit: 2, LabelSelector: "even"}
		for {
			page, err := maps.List(ctx, options)
			if err != nil {
				t.Fatal(err)
			}
			for _, item := range page.Items {
				names = append(names, item.Name)
			}
			if options.Continue = page.Continue; page.Continue == "" {
				break
			}
		}
		if fmt.Sprint(names) != "[m0 m1 m2 m3 m4]" {
			t.Fatalf("pages: %v", names)
		}
	})
}

func TestWatch(t *testing.T) {
	each(t, func(t *testing.T, contentType string) {
		ctx, client, namespace := setup(t, contentType)
		maps := client.CoreV1().ConfigMaps(namespace)
		list, err := maps.List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		watcher, err := maps.Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion, LabelSelector: "w=1"})
		if err != nil {
			t.Fatal(err)
		}
		defer watcher.Stop()
		made, err := maps.Create(ctx, configMap("w", map[string]string{"w": "1"}), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		made.Data["a"] = "2"
		if _, err := maps.Update(ctx, made, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := maps.Delete(ctx, "w", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, expected := range []watch.EventType{watch.Added, watch.Modified, watch.Deleted} {
			event := <-watcher.ResultChan()
			object, ok := event.Object.(*corev1.ConfigMap)
			if event.Type != expected || !ok || object.Name != "w" {
				t.Fatalf("expected %s, got %s %v", expected, event.Type, event.Object)
			}
		}
	})
}

// A reflector of this release starts with a streaming list.
func TestInformer(t *testing.T) {
	each(t, func(t *testing.T, contentType string) {
		ctx, client, namespace := setup(t, contentType)
		maps := client.CoreV1().ConfigMaps(namespace)
		if _, err := maps.Create(ctx, configMap("before", nil), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(namespace))
		informer := factory.Core().V1().ConfigMaps().Informer()
		added := make(chan string, 16)
		if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: func(object any) { added <- object.(*corev1.ConfigMap).Name },
		}); err != nil {
			t.Fatal(err)
		}
		factory.Start(ctx.Done())
		if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
			t.Fatal("not synced")
		}
		if _, err := maps.Create(ctx, configMap("later", nil), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{}
		for !seen["before"] || !seen["later"] {
			select {
			case name := <-added:
				seen[name] = true
			case <-ctx.Done():
				t.Fatalf("seen only %v", seen)
			}
		}
	})
}

func TestServerSideApply(t *testing.T) {
	each(t, func(t *testing.T, contentType string) {
		ctx, client, namespace := setup(t, contentType)
		maps := client.CoreV1().ConfigMaps(namespace)
		apply := func(manager string, force bool, data map[string]string) (*corev1.ConfigMap, error) {
			body := applycorev1.ConfigMap("ssa", namespace).WithData(data)
			return maps.Apply(ctx, body, metav1.ApplyOptions{FieldManager: manager, Force: force})
		}
		if _, err := apply("one", false, map[string]string{"a": "1", "b": "1"}); err != nil {
			t.Fatal(err)
		}
		both, err := apply("two", false, map[string]string{"c": "1"})
		if err != nil || len(both.Data) != 3 || len(both.ManagedFields) != 2 {
			t.Fatalf("shared: %v %v", both, err)
		}
		if _, err := apply("two", false, map[string]string{"c": "1", "a": "2"}); !apierrors.IsConflict(err) {
			t.Fatalf("no conflict: %v", err)
		}
		if _, err := apply("two", true, map[string]string{"c": "1", "a": "2"}); err != nil {
			t.Fatal(err)
		}
		left, err := apply("one", false, nil)
		if err != nil || fmt.Sprint(left.Data) != "map[a:2 c:1]" {
			t.Fatalf("given up: %v %v", left, err)
		}
	})
}

func TestDynamicAndMetadataClients(t *testing.T) {
	ctx, _, namespace := setup(t, "application/json")
	objects, err := dynamic.NewForConfig(config(t))
	if err != nil {
		t.Fatal(err)
	}
	resource := schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}
	labels := map[string]any{"app": "web"}
	if _, err := objects.Resource(resource).Namespace(namespace).Create(ctx, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apps/v1", "kind": "Deployment", "metadata": map[string]any{"name": "web", "labels": labels},
		"spec": map[string]any{
			"replicas": int64(0), "selector": map[string]any{"matchLabels": labels},
			"template": map[string]any{
				"metadata": map[string]any{"labels": labels},
				"spec": map[string]any{"containers": []any{map[string]any{"name": "web", "image": "example.invalid/web:1"}}},
			},
		},
	}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	heads, err := metadata.NewForConfig(config(t))
	if err != nil {
		t.Fatal(err)
	}
	list, err := heads.Resource(resource).Namespace(namespace).List(ctx, metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 || list.Items[0].Labels["app"] != "web" {
		t.Fatalf("metadata: %v %v", list, err)
	}
	scale, err := objects.Resource(resource).Namespace(namespace).Get(ctx, "web", metav1.GetOptions{}, "scale")
	if err != nil || scale.GetKind() != "Scale" {
		t.Fatalf("scale: %v %v", scale, err)
	}
}
