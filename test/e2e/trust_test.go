package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// claimGrace is the plugin's --claim-grace in this suite: how soon it unprepares claims that are
// gone from the API.
const claimGrace = "10s"

// TestTrust creates states that other programs may leave on the driver's node: claims deleted
// without the kubelet, checkpoint records of another release, and other NVIDIA drivers. Claims must
// stay correct in each.
func TestTrust(t *testing.T) {
	t.Parallel()
	sim := simulator(t)
	w := bringUp(t, "e2e-trust", sim.Node(survivor, "dgx-h100"))
	w.needSMI(t)
	w.installTrust(t)
	w.offers(t, survivor, survivorGPUs)
	t.Run("releases with other records", w.testReleases)
	t.Run("claims deleted without the kubelet", w.testAbandoned)
	t.Run("the device plugin on the same node", w.testDevicePlugin)
	t.Run("claims and files of the reference driver", w.testReferenceDriver)
}

func (w *world) installTrust(t *testing.T, more ...string) {
	t.Helper()
	w.install(t, append([]string{"--set", "extraArgs={--claim-grace=" + claimGrace + "}"}, more...)...)
}

// testAbandoned deletes a claim by hand while its Pod runs, and the Pod while the kubelet is down,
// so that the kubelet never unprepares the claim. No other claim may get the GPU while the
// container runs, and the plugin must free the GPU afterwards.
//
// A second claim is still allocated but has no Pod. It must stay prepared for its next Pod.
func (w *world) testAbandoned(t *testing.T) {
	u := w.tenant(t)
	u.gpus(1, survivorGPUs)
	u.claim("gone", `requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]`)
	u.holder("stays", 1)
	u.pod("gone", fromClaim("gpu", "gone"), container("main", "gpu"), lasting)
	stays, gone := u.holding("stays"), u.holding("gone")
	idle := u.heldWithoutPod("idle", stays, gone)

	k := w.killPlugin(t)
	w.deleteByHand(t, u.namespace, "gone")
	w.back(t, k)
	kubelet := w.node(t, survivor)
	if err := kubelet.Service(t.Context(), "stop", "kubelet"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			_ = kubelet.Service(t.Context(), "start", "kubelet")
		}
	})
	process := mainProcess(t, "TEST_POD_UID", gone.podUID)
	u.forget("gone")
	w.nodeSays(t, "ClaimGone", gone.claimUID, "delete Pod "+u.namespace+"/gone")
	if !w.hasRecord(t, survivor, gone.claimUID) {
		t.Error("the claim was unprepared while its container runs")
	}
	kill(t, process)
	eventually(t, 90*time.Second, "the claim is unprepared", func() (bool, string) {
		return !w.hasRecord(t, survivor, gone.claimUID), "it has a record"
	})
	w.nodeSays(t, "Repaired", gone.claimUID, "it was deleted")
	if !w.hasRecord(t, survivor, stays.claimUID) || !w.hasRecord(t, survivor, idle) {
		t.Error("a claim that still exists was unprepared")
	}
	if err := kubelet.Service(t.Context(), "start", "kubelet"); err != nil {
		t.Fatal(err)
	}
	if metrics := w.get(t, survivor, "metrics"); !strings.Contains(metrics, `gpu_dra_repairs_total{kind="abandoned-claim"} 1`+"\n") {
		t.Errorf("the metrics do not count one unprepared claim:\n%s", metrics)
	}
	u.pod("next", fromClaim("gpu", "idle"), container("main", "gpu"), lasting)
	if next := u.holding("next"); next.claimUID != idle || !w.hasRecord(t, survivor, idle) {
		t.Errorf("the next Pod has claim %s, want %s; that claim has a record: %v", next.claimUID, idle, w.hasRecord(t, survivor, idle))
	}
	u.undisturbed(stays)
	u.remove("stays", "next")
	w.deleteByHand(t, u.namespace, "idle")
	u.holder("all", survivorGPUs)
	u.holding("all")
	u.remove("all")
	w.clean(t, survivor)
}

// heldWithoutPod creates a claim with a GPU that others do not hold, prepares it as the kubelet
// does, and removes the claim's user. It returns the claim's UID. The user is a fake Job, because
// the claim of a deleted Pod would lose its allocation.
func (u tenant) heldWithoutPod(name string, others ...holding) string {
	u.t.Helper()
	var device string
	for d, g := range u.world.gpus(u.t, survivor) {
		if !slices.ContainsFunc(others, func(h holding) bool { return slices.Contains(h.gpus, *g.Attributes["uuid"].StringValue) }) {
			device = d
		}
	}
	u.handAllocate(u.t, u.namespace, name, survivor, device)
	claims := u.Client.ResourceV1().ResourceClaims(u.namespace)
	reserve := func(users ...resourceapi.ResourceClaimConsumerReference) types.UID {
		u.t.Helper()
		claim := u.claimNamed(u.t, u.namespace, name)
		claim.Status.ReservedFor = users
		if _, err := claims.UpdateStatus(u.t.Context(), claim, metav1.UpdateOptions{}); err != nil {
			u.t.Fatal(err)
		}
		return claim.UID
	}
	uid := reserve(resourceapi.ResourceClaimConsumerReference{APIGroup: "batch", Resource: "jobs", Name: name, UID: "its-user"})
	answer, err := u.asKubelet(u.t).NodePrepareResources(u.t.Context(), &drapb.NodePrepareResourcesRequest{
		Claims: []*drapb.Claim{{Namespace: u.namespace, Name: name, Uid: string(uid)}},
	})
	if err != nil {
		u.t.Fatal(err)
	}
	if msg := answer.GetClaims()[string(uid)].GetError(); msg != "" {
		u.t.Fatal(msg)
	}
	reserve()
	return string(uid)
}

// deleteByHand removes a claim's finalizers and deletes the claim although it is in use.
func (w *world) deleteByHand(t *testing.T, namespace, claim string) {
	t.Helper()
	claims := w.Client.ResourceV1().ResourceClaims(namespace)
	if _, err := claims.Patch(t.Context(), claim, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`),
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := claims.Delete(t.Context(), claim, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, "the claim is gone", func() (bool, string) {
		_, err := claims.Get(t.Context(), claim, metav1.GetOptions{})
		return apierrors.IsNotFound(err), fmt.Sprint(err)
	})
}

// nodeSays waits for an Event about the node with this reason and all of these parts.
func (w *world) nodeSays(t *testing.T, reason string, parts ...string) {
	t.Helper()
	eventually(t, 90*time.Second, fmt.Sprintf("an Event %s of the node says %q", reason, parts), func() (bool, string) {
		said := w.events(t, "", survivor)
		for line := range strings.SplitSeq(said, "\n") {
			all := strings.HasPrefix(line, reason+": ")
			for _, part := range parts {
				all = all && strings.Contains(line, part)
			}
			if all {
				return true, ""
			}
		}
		return false, said
	})
}

// testDevicePlugin sets the Node's capacity of nvidia.com/gpu, as the kubelet does for a device
// plugin. The driver must refuse new claims until the capacity is gone.
func (w *world) testDevicePlugin(t *testing.T) {
	u := w.tenant(t)
	u.gpus(1)
	u.holder("before", 1)
	before := u.holding("before")
	capacity := func(gpus string) {
		t.Helper()
		patch := `{"status":{"capacity":{"nvidia.com/gpu":` + gpus + `}}}`
		if _, err := w.Client.CoreV1().Nodes().Patch(t.Context(), survivor, types.MergePatchType, []byte(patch), metav1.PatchOptions{},
			"status"); err != nil {
			t.Fatal(err)
		}
	}
	capacity(`"8"`)
	w.nodeSays(t, "DevicePlugin", "nvidia.com/gpu=8")
	u.tolerant()
	u.pod("after", fromTemplate("gpu", "tolerant"), container("main", "gpu"), lasting)
	eventually(t, 60*time.Second, "the new Pod is refused", func() (bool, string) {
		events := u.events(t, u.namespace, "after")
		return strings.Contains(events, "FailedPrepareDynamicResources") && strings.Contains(events, "device plugin"), events
	})
	capacity("null")
	u.holding("after")
	u.undisturbed(before)
	u.remove("before", "after")
	w.clean(t, survivor)
}

// testReferenceDriver fakes a checkpoint of NVIDIA's DRA driver, which has prepared a whole GPU and
// a partition for two claims. This driver must not offer that GPU and that partition until the
// claims are unprepared.
func (w *world) testReferenceDriver(t *testing.T) {
	u := w.tenant(t)
	u.gpus(1)
	const whole, part = "aaaaaaaa-1111-4222-8333-444444444444", "bbbbbbbb-1111-4222-8333-444444444444"
	w.smi(t, survivor, "-i", "7", "-mig", "1")
	w.smi(t, survivor, "mig", "-i", "7", "-cgi", "9", "-C")
	listed := w.smi(t, survivor, "-L")
	uuids := func(prefix string) (found []string) {
		for _, field := range strings.FieldsFunc(listed, func(r rune) bool { return strings.ContainsRune(" ()\n", r) }) {
			if strings.HasPrefix(field, prefix) {
				found = append(found, field)
			}
		}
		return found
	}
	gpus, parts := uuids("GPU-"), uuids("MIG-")
	if len(gpus) != survivorGPUs || len(parts) != 1 {
		t.Fatalf("nvidia-smi -L says\n%s", listed)
	}
	dir := w.hostDir(t, survivor, pluginDir)
	checkpoint := filepath.Join(dir, "checkpoint.json")
	content := fmt.Sprintf(`{"checksum":1,"v1":{"preparedClaims":{}},"v2":{"checksum":2,"nodeBootID":%q,"preparedClaims":{
"%s":{"checkpointState":"PrepareCompleted","status":{"reservedFor":[{"resource":"pods","name":"trainer"}]},
  "preparedDevices":[{"devices":[{"gpu":{"info":{"uuid":%q},"device":{"DeviceName":"gpu-0"}}}],"configState":{}}]},
"%s":{"checkpointState":"PrepareCompleted","status":{},
  "preparedDevices":[{"devices":[{"mig":{"concrete":{"giId":%d,"ciId":0,"migUUID":%q,"parentUUID":%q},
   "device":{"DeviceName":"gpu-7-mig-3g40gb-9-0"}}}],"configState":{}}]}}}}`,
		strings.TrimSpace(w.on(t, survivor, "cat", "/proc/sys/kernel/random/boot_id")), whole, gpus[0], part, w.instanceID(t), parts[0], gpus[7])
	if err := os.WriteFile(checkpoint, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	w.replacePlugin(t)
	w.offers(t, survivor, survivorGPUs-2)
	w.nodeSays(t, "GPUsWithheld", whole, "Pod trainer")

	w.unprepareForeign(t, part)
	if left := w.smi(t, survivor, "-L"); strings.Contains(left, parts[0]) {
		t.Errorf("the partition of NVIDIA's DRA driver is still there:\n%s", left)
	}
	w.offers(t, survivor, survivorGPUs-1)
	w.unprepareForeign(t, whole)
	w.offers(t, survivor, survivorGPUs)
	if _, err := os.Stat(checkpoint); !os.IsNotExist(err) {
		t.Errorf("the checkpoint of NVIDIA's DRA driver is still there: %v", err)
	}
	if err := os.Remove(checkpoint + ".ended"); err != nil {
		t.Error(err)
	}
	u.holder("new", 1)
	u.holding("new")
	u.remove("new")
	w.clean(t, survivor)
}

// instanceID returns the ID of the node's only GPU instance.
func (w *world) instanceID(t *testing.T) (id int) {
	t.Helper()
	for line := range strings.Lines(w.smi(t, survivor, "mig", "-lgi")) {
		fields := strings.Fields(strings.Trim(strings.TrimSpace(line), "|"))
		if len(fields) >= 5 && fields[1] == "MIG" {
			if _, err := fmt.Sscan(fields[4], &id); err == nil {
				return id
			}
		}
	}
	t.Fatal("nvidia-smi lists no GPU instance")
	return 0
}

// asKubelet returns a client of the plugin's DRA service, which only the kubelet calls otherwise.
func (w *world) asKubelet(t *testing.T) drapb.DRAPluginClient {
	t.Helper()
	process, instance := w.pluginProcess(t)
	// The path of a socket has a short limit. The path through the plugin's process is short enough.
	socket := fmt.Sprintf("/proc/%d/root%s/dra-%s.sock", process.Pid, pluginDir, instance.UID)
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return drapb.NewDRAPluginClient(conn)
}

// unprepareForeign calls Unprepare for a claim that NVIDIA's DRA driver has prepared, as a kubelet
// does that remembers the claim.
func (w *world) unprepareForeign(t *testing.T, uid string) {
	t.Helper()
	answer, err := w.asKubelet(t).NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{
		Claims: []*drapb.Claim{{Namespace: "default", Name: "foreign", Uid: uid}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if msg := answer.GetClaims()[uid].GetError(); msg != "" {
		t.Fatal(msg)
	}
}
