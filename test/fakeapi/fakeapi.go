// Package fakeapi is an API server in memory for tests of what the plugin publishes.
package fakeapi

import (
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// New returns a client of a fake API server with the Node "node". The server does two things that
// the plain fake client does not: it stores nothing in dry runs, and it gives slices names and
// resource versions. The slice controller recognizes its own writes by these.
func New() *fake.Clientset {
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", UID: "node-uid"}})
	var version atomic.Int64
	Prepend(client, "*", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if written, ok := a.(interface{ GetObject() runtime.Object }); ok {
			if slice, ok := written.GetObject().(*resourceapi.ResourceSlice); ok {
				slice.ResourceVersion = strconv.FormatInt(version.Add(1), 10)
				if slice.Name == "" {
					slice.Name = slice.GenerateName + slice.ResourceVersion
				}
			}
		}
		return false, nil, nil
	})
	Prepend(client, "create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if IsDryRun(a) {
			return true, a.(clienttesting.CreateAction).GetObject(), nil
		}
		return false, nil, nil
	})
	return client
}

// Prepend adds a reactor to a client that may be in use. The fake client reads its reactors under
// its lock, and adds them without.
func Prepend(client *fake.Clientset, verb, resource string, react clienttesting.ReactionFunc) {
	client.Lock()
	defer client.Unlock()
	client.PrependReactor(verb, resource, react)
}

// IsDryRun reports whether the action creates an object as a dry run.
func IsDryRun(a clienttesting.Action) bool {
	create, ok := a.(clienttesting.CreateActionImpl)
	return ok && len(create.CreateOptions.DryRun) > 0
}

// Slices returns the stored ResourceSlices.
func Slices(t *testing.T, client *fake.Clientset) []resourceapi.ResourceSlice {
	t.Helper()
	list, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// Devices returns the names of the devices in the stored ResourceSlices.
func Devices(t *testing.T, client *fake.Clientset) []string {
	t.Helper()
	var devices []string
	for _, s := range Slices(t, client) {
		for _, d := range s.Spec.Devices {
			devices = append(devices, d.Name)
		}
	}
	return devices
}

// SliceWrites counts the client's writes of ResourceSlices by verb. It leaves out dry runs.
func SliceWrites(client *fake.Clientset) map[string]int {
	counts := map[string]int{}
	for _, a := range client.Actions() {
		if a.GetResource().Resource != "resourceslices" || IsDryRun(a) {
			continue
		}
		switch verb := a.GetVerb(); verb {
		case "create", "update", "patch", "delete":
			counts[verb]++
		}
	}
	return counts
}

// Eventually fails the test if ok does not return true within 20 seconds.
func Eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
		<-time.After(10 * time.Millisecond)
	}
}
