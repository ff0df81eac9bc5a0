package uninstall

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
)

func allocatedClaimOf(name, driver string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Driver: driver, Pool: "node", Device: "gpu-0000-1b-00-0", Request: "gpu"}},
		}}},
	}
}

func daemonSet() *appsv1.DaemonSet {
	return &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu", Name: "plugin"}}
}

func TestUninstallRefusesWhileClaimsHoldDevices(t *testing.T) {
	machine := allocatedClaimOf("virtual-machine", device.DriverName)
	machine.Status.Allocation.Devices.Results[0].Device = "gpu-0000-43-00-0-vfio"
	client := fake.NewClientset(daemonSet(), allocatedClaimOf("training", device.DriverName), machine,
		allocatedClaimOf("network", "nic.example.com"),
		&resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "pending"}})
	err := Run(t.Context(), client, "gpu", "plugin", false)
	var held *ClaimsHeldError
	if !errors.As(err, &held) || !slices.Equal(held.Claims, []string{"team/training", "team/virtual-machine"}) {
		t.Fatalf("got %v", err)
	}
	for _, word := range []string{"team/training", "team/virtual-machine", "helm rollback", "--no-hooks"} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q does not contain %q", err, word)
		}
	}
	if _, err := client.AppsV1().DaemonSets("gpu").Get(t.Context(), "plugin", metav1.GetOptions{}); err != nil {
		t.Errorf("the DaemonSet was touched: %v", err)
	}
}

func TestUninstallDeletesTheDaemonSetAndWaits(t *testing.T) {
	for name, force := range map[string]bool{"nothing held": false, "forced": true} {
		t.Run(name, func(t *testing.T) {
			objects := []runtime.Object{daemonSet()}
			if force {
				objects = append(objects, allocatedClaimOf("training", device.DriverName))
			}
			client := fake.NewClientset(objects...)
			if err := Run(t.Context(), client, "gpu", "plugin", force); err != nil {
				t.Fatal(err)
			}
			for _, a := range client.Actions() {
				if d, ok := a.(clienttesting.DeleteActionImpl); ok {
					if p := d.DeleteOptions.PropagationPolicy; p == nil || *p != metav1.DeletePropagationForeground {
						t.Errorf("deleted with propagation %v: the Pods must be gone before the service account", p)
					}
					return
				}
			}
			t.Error("the DaemonSet was not deleted")
		})
	}
}

func TestUninstallGivesUpAtItsDeadline(t *testing.T) {
	client := fake.NewClientset(daemonSet())
	client.PrependReactor("delete", "daemonsets", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, nil })
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	pod := func(name, node, daemonSet string) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "gpu", Name: name,
				OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: daemonSet, Controller: ptr.To(true)}}},
			Spec: corev1.PodSpec{NodeName: node},
		}
	}
	for _, p := range []*corev1.Pod{pod("plugin-x", "dead-node", "plugin"), pod("other-y", "fine-node", "other")} {
		if err := client.Tracker().Add(p); err != nil {
			t.Fatal(err)
		}
	}
	err := Run(ctx, client, "gpu", "plugin", false)
	if err == nil || !strings.Contains(err.Error(), "gpu/plugin") || !strings.Contains(err.Error(), "plugin-x on node dead-node") ||
		strings.Contains(err.Error(), "fine-node") {
		t.Errorf("got %v", err)
	}
}

func TestDaemonSetGone(t *testing.T) {
	deleted := daemonSet()
	deleted.DeletionTimestamp = ptr.To(metav1.Now())
	deleted.Finalizers = []string{"foregroundDeletion"}
	for name, c := range map[string]struct {
		client *fake.Clientset
		want   bool
	}{
		"update or eviction":    {fake.NewClientset(daemonSet()), false},
		"deleted in foreground": {fake.NewClientset(deleted), true},
		"deleted and gone":      {fake.NewClientset(), true},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := daemonSetGone(t.Context(), c.client, "gpu", "plugin")
			if err != nil || got != c.want {
				t.Errorf("got %v, %v", got, err)
			}
		})
	}
	client := fake.NewClientset(daemonSet())
	client.PrependReactor("get", "daemonsets", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("forbidden")
	})
	if _, err := daemonSetGone(t.Context(), client, "gpu", "plugin"); err == nil {
		t.Error("an error of the API server counts as an answer")
	}
}

func TestCleanupRemovesOnlyOurFiles(t *testing.T) {
	for name, theirs := range map[string][]string{"only our files": nil, "foreign files": {"bin/their-hook", "theirs"}} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "gpu.nvidia.com")
			made := []string{"state/claims", "bin"}
			if theirs != nil {
				made = append(made, "their-directory")
			}
			for _, sub := range made {
				if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			for _, f := range append([]string{"publisher.lock", "publisher.request", "state/claims.lock"}, theirs...) {
				if err := os.WriteFile(filepath.Join(dir, f), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			left, err := removePluginDir(dir, filepath.Join(dir, "state"))
			if err != nil {
				t.Fatal(err)
			}
			var want []string
			if theirs != nil {
				for _, path := range []string{"bin", "their-directory", "theirs"} {
					want = append(want, filepath.Join(dir, path))
				}
			}
			for _, path := range theirs {
				if _, err := os.Stat(filepath.Join(dir, path)); err != nil {
					t.Error(err)
				}
			}
			if !slices.Equal(left, want) {
				t.Errorf("reported as left: %q, want %q", left, want)
			}
			if _, err := os.Stat(dir); os.IsNotExist(err) != (theirs == nil) {
				t.Errorf("the directory: %v", err)
			}
		})
	}
}

// The checkpoint of NVIDIA's DRA driver stays, so the notes about its ended claims must stay too.
// After a new installation, nothing would end these claims once more.
func TestCleanupKeepsNotesOfReferenceDriversClaims(t *testing.T) {
	for name, withCheckpoint := range map[string]bool{"checkpoint": true, "no checkpoint": false} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "gpu.nvidia.com")
			state, checkpoint := filepath.Join(dir, "state"), filepath.Join(dir, predecessor.File)
			for _, sub := range []string{"claims", "mig"} {
				if err := os.MkdirAll(filepath.Join(state, sub), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			const claims = `{"v2":{"preparedClaims":{
				"ended":{"status":{"reservedFor":[{"resource":"pods","name":"a","uid":"a"}]}},
				"running":{"status":{"reservedFor":[{"resource":"pods","name":"b","uid":"b"}]}}}}}`
			if err := os.WriteFile(checkpoint, []byte(claims), 0o600); err != nil {
				t.Fatal(err)
			}
			left := func() []predecessor.Claim {
				t.Helper()
				left, err := predecessor.NewStore(dir, state, device.DriverName, "boot", durable.OS{}).Claims()
				if err != nil {
					t.Fatal(err)
				}
				return left
			}
			store := predecessor.NewStore(dir, state, device.DriverName, "boot", durable.OS{})
			if _, err := store.MarkEnded(left()[0]); err != nil {
				t.Fatal(err)
			}
			if !withCheckpoint {
				if err := os.Remove(checkpoint); err != nil {
					t.Fatal(err)
				}
			}

			kept, err := removePluginDir(dir, state)
			if err != nil {
				t.Fatal(err)
			}
			if !withCheckpoint {
				if _, err := os.Stat(dir); !os.IsNotExist(err) || len(kept) != 0 {
					t.Errorf("kept %q: %v", kept, err)
				}
				return
			}
			if now := left(); len(now) != 1 || now[0].UID != "running" {
				t.Errorf("after a new installation: %v", now)
			}
			if there, err := os.ReadDir(state); err != nil || len(there) != 1 {
				t.Errorf("other state is left: %v, %v", there, err)
			}
			if !slices.Equal(kept, []string{checkpoint, state}) {
				t.Errorf("reported as kept: %q", kept)
			}
		})
	}
}

func TestCleanupFailureReportsNoForeignFiles(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "theirs"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	left, err := removePluginDir(dir, filepath.Join(dir, "no such name \x00"))
	if err == nil || left != nil {
		t.Errorf("got %q, %v", left, err)
	}
}
