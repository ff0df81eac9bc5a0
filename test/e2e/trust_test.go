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

// claimGrace is how soon the plugin of this suite gives back what claims hold that are gone.
const claimGrace = "10s"

// What others do to a node of ours, or have done before: claims are deleted behind the kubelet's back, another release has written the records, other drivers
// of NVIDIA's are, or were, there.
func TestTrust(t *testing.T) {
	t.Parallel()
	sim := simulator(t)
	w := bringUp(t, "e2e-trust", sim.Node(survivor, "dgx-h100"))
	w.needSMI(t)
	w.installTrust(t)
	w.offers(t, survivor, survivorGPUs)
	t.Run("releases with other records", w.testReleases)
	t.Run("claims that are deleted behind the kubelet's back", w.testAbandoned)
	t.Run("the device plugin on the same node", w.testDevicePlugin)
	t.Run("what the reference driver has left", w.testReferenceDriver)
}

func (w *world) installTrust(t *testing.T, more ...string) {
	t.Helper()
	w.install(t, append([]string{"--set", "extraArgs={--claim-grace=" + claimGrace + "}"}, more...)...)
}

// A claim is deleted by hand while its Pod runs and the plugin is down, and while the kubelet is down that Pod goes, so that nobody asks for the claim to be
// given back. While its container runs, nobody else gets its GPU; after that it is free. Another
// claim keeps its allocation and has no Pod: it stays prepared for its next one.
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
		t.Error("the claim was given back while its container runs")
	}
	kill(t, process)
	eventually(t, 90*time.Second, "the claim is given back", func() (bool, string) {
		return !w.hasRecord(t, survivor, gone.claimUID), "it has a record"
	})
	w.nodeSays(t, "Repaired", gone.claimUID, "it was deleted")
	if !w.hasRecord(t, survivor, stays.claimUID) || !w.hasRecord(t, survivor, idle) {
		t.Error("a claim that is there was given back")
	}
	if err := kubelet.Service(t.Context(), "start", "kubelet"); err != nil {
		t.Fatal(err)
	}
	if metrics := w.get(t, survivor, "metrics"); !strings.Contains(metrics, `gpu_dra_repairs_total{kind="abandoned-claim"} 1`+"\n") {
		t.Errorf("the metrics do not tell of one claim that was given back:\n%s", metrics)
	}
	u.pod("next", fromClaim("gpu", "idle"), container("main", "gpu"), lasting)
	if next := u.holding("next"); next.claimUID != idle || !w.hasRecord(t, survivor, idle) {
		t.Errorf("the next Pod has claim %s, and of %s there is a record: %v", next.claimUID, idle, w.hasRecord(t, survivor, idle))
	}
	u.undisturbed(stays)
	u.remove("stays", "next")
	w.deleteByHand(t, u.namespace, "idle")
	u.holder("all", survivorGPUs)
	u.holding("all")
	u.remove("all")
	w.clean(t, survivor)
}

// heldWithoutPod makes a claim that is allocated a GPU which others do not hold, has it prepared as the kubelet does, and takes the claim's user away. It
// returns the claim's UID. The user is no Pod: the claim of one that has gone would lose its allocation.
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

// deleteByHand deletes a claim although it is in use.
func (w *world) deleteByHand(t *testing.T, namespace, claim string) {
	t.Helper()
	claims := w.Client.ResourceV1().ResourceClaims(namespace)
	if _, err := claims.Patch(t.Context(), claim, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
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

// nodeSays waits for an Event about the node.
func (w *world) nodeSays(t *testing.T, reason string, parts ...string) {
	t.Helper()
	eventually(t, 90*time.Second, fmt.Sprintf("the node says %s with %q", reason, parts), func() (bool, string) {
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

// The Node's capacity is what the kubelet writes there for a device plugin.
func (w *world) testDevicePlugin(t *testing.T) {
	u := w.tenant(t)
	u.gpus(1)
	u.holder("before", 1)
	before := u.holding("before")
	capacity := func(gpus string) {
		t.Helper()
		patch := `{"status":{"capacity":{"nvidia.com/gpu":` + gpus + `}}}`
		if _, err := w.Client.CoreV1().Nodes().Patch(t.Context(), survivor, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "status"); err != nil {
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

// The reference driver has a whole GPU and a partition with claims of two Pods.
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
"%s":{"checkpointState":"PrepareCompleted","status":{"reservedFor":[{"resource":"pods","name":"trainer"}]},"preparedDevices":[{"devices":[{"gpu":{"info":{"uuid":%q},"device":{"DeviceName":"gpu-0"}}}],"configState":{}}]},
"%s":{"checkpointState":"PrepareCompleted","status":{},"preparedDevices":[{"devices":[{"mig":{"concrete":{"giId":%d,"ciId":0,"migUUID":%q,"parentUUID":%q},"device":{"DeviceName":"gpu-7-mig-3g40gb-9-0"}}}],"configState":{}}]}}}}`,
		strings.TrimSpace(w.on(t, survivor, "cat", "/proc/sys/kernel/random/boot_id")), whole, gpus[0], part, w.instanceID(t), parts[0], gpus[7])
	if err := os.WriteFile(checkpoint, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	w.replacePlugin(t)
	w.offers(t, survivor, survivorGPUs-2)
	w.nodeSays(t, "GPUsWithheld", whole, "Pod trainer")

	w.unprepareForeign(t, part)
	if left := w.smi(t, survivor, "-L"); strings.Contains(left, parts[0]) {
		t.Errorf("the partition of the reference driver is still there:\n%s", left)
	}
	w.offers(t, survivor, survivorGPUs-1)
	w.unprepareForeign(t, whole)
	w.offers(t, survivor, survivorGPUs)
	if _, err := os.Stat(checkpoint); !os.IsNotExist(err) {
		t.Errorf("its checkpoint is still there: %v", err)
	}
	if err := os.Remove(checkpoint + ".ended"); err != nil {
		t.Error(err)
	}
	u.holder("new", 1)
	u.holding("new")
	u.remove("new")
	w.clean(t, survivor)
}

// instanceID is that of the one GPU instance on the node.
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

// asKubelet calls the plugin as the kubelet does.
func (w *world) asKubelet(t *testing.T) drapb.DRAPluginClient {
	t.Helper()
	process, instance := w.pluginProcess(t)
	// A socket's path has little room: the process's own view of its directory is short.
	socket := fmt.Sprintf("/proc/%d/root%s/dra-%s.sock", process.Pid, pluginDir, instance.UID)
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return drapb.NewDRAPluginClient(conn)
}

// unprepareForeign asks for a claim to be given back, as the kubelet does that knows it from the driver before.
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
