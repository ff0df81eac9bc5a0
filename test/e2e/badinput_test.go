package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

const (
	badNode = "bad"
	badGPUs = 8

	stateDir = pluginDir + "/state"
)

// TestBadInput is what users, hand-made allocations, disks and vanished cards can give the driver: each has its error where the user looks, the rest of
// the node goes on, and what was wrong can be set right.
func TestBadInput(t *testing.T) {
	sim := simulator(t)
	node := sim.Node(badNode, "dgx-h100")
	// A disk of its own for the driver's state, small enough to be filled.
	mountState := fmt.Sprintf(`"$@"; mkdir -p %[1]s; mount -t tmpfs -o size=256k state %[1]s`, stateDir)
	node.BootHook = append([]string{"/bin/sh", "-ec", mountState, "boot"}, node.BootHook...)
	w := start(t, "e2e-bad", node)
	w.offers(t, badNode, badGPUs)

	t.Run("OpaqueConfigTheAPIRefuses", w.testOpaqueConfigTheAPIRefuses)
	t.Run("OpaqueConfig", w.testOpaqueConfig)
	t.Run("UnknownDevice", w.testUnknownDevice)
	t.Run("VanishedDevice", w.testVanishedDevice)
	t.Run("BrokenRecords", w.testBrokenRecords)
	t.Run("FullDisk", w.testFullDisk)
	t.Run("ReadOnlyDisk", w.testReadOnlyDisk)
	t.Run("EverythingIsFree", w.testEverythingIsFree)
}

// What the API server knows to be wrong never gets to the driver: the user sees it at once.
func (w *world) testOpaqueConfigTheAPIRefuses(t *testing.T) {
	ns := w.namespace(t)
	for name, c := range map[string]struct{ parameters, says string }{
		"not an object": {"[1, 2]", "parameters: Invalid value"},
		"text":          {`'{"apiVersion": '`, "parameters: Invalid value"},
		"too long":      {gpuConfig("note: " + strings.Repeat("x", resourceapi.OpaqueParametersMaxLength)), "parameters: Too long"},
	} {
		err := w.tryApply(t, ns, claimYAML("refused", c.parameters))
		if err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), "ResourceClaim") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func (w *world) testOpaqueConfig(t *testing.T) {
	ns := w.namespace(t)
	w.apply(t, "", `
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata:
  name: badly-configured
spec:
  selectors: [{cel: {expression: device.driver == 'gpu.nvidia.com'}}]
  config: [{opaque: {driver: gpu.nvidia.com, parameters: `+gpuConfig("sharing: {strategy: MPS}")+`}}]
`)
	cases := map[string]struct {
		claim string
		says  []string
	}{
		"unknown-field":    {claimYAML("unknown-field", gpuConfig("sharin: {}")), []string{"GpuConfig", `unknown field "sharin"`, "spelling"}},
		"unknown-kind":     {claimYAML("unknown-kind", "{apiVersion: resource.nvidia.com/v1beta1, kind: Gpu}"), []string{`kind "Gpu"`, "GpuConfig, MigDeviceConfig, VfioDeviceConfig"}},
		"wrong-kind":       {claimYAML("wrong-kind", "{apiVersion: resource.nvidia.com/v1beta1, kind: MigDeviceConfig}"), []string{"is a MigDeviceConfig", "takes a GpuConfig"}},
		"wrong-type":       {claimYAML("wrong-type", gpuConfig("sharing: 7")), []string{"wrong type"}},
		"unknown-strategy": {claimYAML("unknown-strategy", gpuConfig("sharing: {strategy: Luck}")), []string{"sharing.strategy", "Luck", "TimeSlicing"}},
		"not-built-yet":    {claimYAML("not-built-yet", gpuConfig("sharing: {strategy: TimeSlicing}")), []string{`sharing strategy "TimeSlicing" is not supported by this version`}},
		"bad-class":        {strings.Replace(claimYAML("bad-class", ""), "gpu.nvidia.com", "badly-configured", 1), []string{`sharing strategy "MPS" is not supported by this version`}},
	}
	for name, c := range cases {
		w.apply(t, ns, c.claim+podOnClaim(name, badNode, name))
	}
	w.apply(t, ns, podOn("good", badNode)+podOnNothing("no-gpu", badNode))
	w.running(t, ns, "good", "no-gpu")
	for name, c := range cases {
		w.refused(t, ns, name, append(c.says, "claim "+ns+"/"+name)...)
	}
	w.counts(t, badNode, "prepare", "claim")
	w.running(t, ns, "good")
	w.givenBack(t, ns)
}

func (w *world) testUnknownDevice(t *testing.T) {
	ns := w.namespace(t)
	device := w.freeDevices(t)[0]
	for name, c := range map[string]struct {
		pool    string
		devices []string
		says    []string
	}{
		"unknown":       {badNode, []string{"gpu-0000-ff-00-0"}, []string{"device gpu-0000-ff-00-0, which is not on this node", "it offers " + device}},
		"of-no-shape":   {badNode, []string{"left-shoe"}, []string{"device left-shoe, which is not on this node"}},
		"half-unknown":  {badNode, []string{device, "gpu-0000-fe-00-0"}, []string{"device gpu-0000-fe-00-0, which is not on this node"}},
		"another-pool":  {"elsewhere", []string{device}, []string{"of pool elsewhere", "this node's pool is " + badNode}},
		"one-gpu-twice": {badNode, []string{device, device}, []string{"were both allocated device " + device}},
	} {
		w.handAllocate(t, ns, name, c.pool, c.devices...)
		w.apply(t, ns, podOnClaim(name, badNode, name))
		w.refused(t, ns, name, append(c.says, "claim "+ns+"/"+name)...)
	}
	w.apply(t, ns, podOn("good", badNode))
	w.running(t, ns, "good")
	w.givenBack(t, ns)
}

func (w *world) testVanishedDevice(t *testing.T) {
	ns := w.namespace(t)
	w.apply(t, ns, claimYAML("holds", "")+podOnClaim("before", badNode, "holds"))
	w.running(t, ns, "before")
	device := w.allocated(t, ns, "holds")

	w.nvmlsim(t, badNode, "lose", pciAddress(device))
	w.nvmlsim(t, badNode, "driver", "reload", "--force")
	eventually(t, 30*time.Second, "the device is offered no more", func() (bool, string) {
		now := w.gpus(t, badNode)
		_, still := now[device]
		return !still && len(now) == badGPUs-1, fmt.Sprint(len(now))
	})
	// An allocation from a moment before the device vanished. (About the next Pod of a claim that is prepared the kubelet asks nobody.)
	w.handAllocate(t, ns, "too-late", badNode, device)
	w.apply(t, ns, podOnClaim("too-late", badNode, "too-late")+podOn("good", badNode))
	w.running(t, ns, "good")
	w.refused(t, ns, "too-late", "device "+device+", which is not on this node", "it offers gpu-")
	w.counts(t, badNode, "prepare", "device")
	// The claim of the Pod that runs on it can be given back without its device.
	w.givenBack(t, ns)

	w.nvmlsim(t, badNode, "restore", pciAddress(device))
	w.nvmlsim(t, badNode, "driver", "reload", "--force")
	w.offers(t, badNode, badGPUs)
	w.handAllocate(t, ns, "again", badNode, device)
	w.apply(t, ns, podOnClaim("again", badNode, "again"))
	w.running(t, ns, "again")
	w.givenBack(t, ns)
}

// testBrokenRecords breaks the records of claims that running Pods hold, under the plugin, and starts it again on them.
func (w *world) testBrokenRecords(t *testing.T) {
	ns := w.namespace(t)
	kinds := map[string]struct {
		damage func(record string) string
		says   string
	}{
		"truncated": {func(r string) string { return r[:len(r)/2] }, "is unreadable"},
		"empty":     {func(string) string { return "" }, "it is empty"},
		"flipped":   {func(r string) string { return strings.Replace(r, "Prepared", "Preparee", 1) }, "checksum"},
		"future":    {func(r string) string { return strings.Replace(r, `"formatVersion":1`, `"formatVersion":99`, 1) }, "format version 99"},
	}
	for kind := range kinds {
		w.apply(t, ns, claimYAML(kind, "")+podOnClaim(kind, badNode, kind))
	}
	intact := map[string]string{}
	for kind, k := range kinds {
		w.running(t, ns, kind)
		file := w.recordOf(t, ns, kind)
		intact[kind] = w.on(t, badNode, "cat", file)
		broken := k.damage(intact[kind])
		if broken == intact[kind] {
			t.Fatalf("the record was not damaged: %s", broken)
		}
		w.write(t, badNode, file, broken)
	}

	// The GPUs stay held: an allocation that names one all the same is refused, and says what is wrong with whose record.
	for kind, k := range kinds {
		w.handAllocate(t, ns, "wants-"+kind, badNode, w.allocated(t, ns, kind))
		w.apply(t, ns, podOnClaim("wants-"+kind, badNode, "wants-"+kind))
		w.refused(t, ns, "wants-"+kind, "is held by", w.uidOf(t, ns, kind), "cannot be read", k.says)
	}
	w.counts(t, badNode, "prepare", "held")
	w.apply(t, ns, podOn("good", badNode))
	w.running(t, ns, "good")

	// A plugin that starts on them says so of each and serves. The kubelet starts again too: it would remember that the claims are prepared, and ask
	// nobody about their next Pods.
	old := w.livePlugin(t, badNode)
	w.deletePlugin(t, old)
	if err := w.node(t, badNode).RestartKubelet(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, 60*time.Second, "another plugin is ready", func() (bool, string) {
		return w.livePlugin(t, badNode).UID != old.UID && w.readiness(t, badNode) == "ok", w.readiness(t, badNode)
	})
	log := w.logOf(t, badNode)
	for kind, k := range kinds {
		if !slices.ContainsFunc(strings.Split(log, "\n"), func(line string) bool {
			return strings.Contains(line, "Could not recover a claim") && strings.Contains(line, w.uidOf(t, ns, kind)) && strings.Contains(line, k.says)
		}) {
			t.Errorf("the log does not say %q of the %s record", k.says, kind)
		}
	}
	w.apply(t, ns, podOn("good-2", badNode))
	w.running(t, ns, "good-2")
	for kind := range kinds {
		w.running(t, ns, kind)
	}

	// A further Pod of such a claim sets an unreadable record aside and makes a new one. A later version's record is not this one's to judge.
	w.apply(t, ns, podOnClaim("joins-empty", badNode, "empty")+podOnClaim("joins-future", badNode, "future"))
	w.running(t, ns, "joins-empty")
	w.refused(t, ns, "joins-future", "format version 99", "reads up to 1", "install the later driver again")

	// The end of a claim's last Pod resolves what can be resolved.
	claim := w.uidOf(t, ns, "future")
	if _, err := w.Kubectl(t.Context(), "-n", ns, "delete", "--wait=false", "pod", "truncated", "empty", "joins-empty", "flipped", "future", "joins-future"); err != nil {
		t.Fatal(err)
	}
	eventually(t, 60*time.Second, "the claim's Events say why its device is not given back", func() (bool, string) {
		events := w.events(t, ns, "future")
		return strings.Contains(events, "UnprepareFailed") && strings.Contains(events, "format version 99"), events
	})
	w.running(t, ns, "wants-truncated", "wants-empty", "wants-flipped")
	if aside := strings.Fields(w.on(t, badNode, "ls", stateDir+"/quarantine")); len(aside) != 3 {
		t.Errorf("set aside for someone to look at: %q, want three records", aside)
	}
	w.refused(t, ns, "wants-future", "is held by")
	w.write(t, badNode, fmt.Sprintf("%s/claims/%s_%s.json", stateDir, claim, w.allocated(t, ns, "wants-future")), intact["future"]) // as if the later driver were back
	w.running(t, ns, "wants-future")
	w.on(t, badNode, "sh", "-c", "rm "+stateDir+"/quarantine/*")
	w.givenBack(t, ns)
}

func (w *world) testFullDisk(t *testing.T) {
	ns := w.namespace(t)
	w.apply(t, ns, claimYAML("held", "")+podOnClaim("before", badNode, "held"))
	w.running(t, ns, "before")
	w.on(t, badNode, "sh", "-c", fmt.Sprintf("dd if=/dev/zero of=%[1]s/filler bs=4096 2>/dev/null; dd if=/dev/zero of=%[1]s/filler2 bs=1 2>/dev/null; df %[1]s", stateDir))

	w.apply(t, ns, claimYAML("new", "")+podOnClaim("refused", badNode, "new"))
	w.refused(t, ns, "refused", "no space left on device", stateDir+"/claims", "claim "+ns+"/new")
	w.counts(t, badNode, "prepare", "record")
	w.leftNothing(t, w.uidOf(t, ns, "new"))
	// What needs no space goes on: a running Pod, another one of the same claim, and giving the claim back.
	w.apply(t, ns, podOnClaim("joins", badNode, "held")+podOnNothing("no-gpu", badNode))
	w.running(t, ns, "before", "joins", "no-gpu")
	if got := len(w.gpus(t, badNode)); got != badGPUs {
		t.Errorf("the node offers %d devices, want %d", got, badGPUs)
	}
	uid := w.uidOf(t, ns, "held")
	w.deletePods(t, ns, "before", "joins")
	w.leftNothing(t, uid)

	w.on(t, badNode, "sh", "-c", "rm "+stateDir+"/filler*")
	w.running(t, ns, "refused")
	w.givenBack(t, ns)
}

func (w *world) testReadOnlyDisk(t *testing.T) {
	ns := w.namespace(t)
	w.apply(t, ns, claimYAML("held", "")+podOnClaim("before", badNode, "held"))
	w.running(t, ns, "before")
	// Mounted elsewhere first, because only a new mount reaches the plugin's container, not a change of one's flags.
	w.on(t, badNode, "sh", "-ec", fmt.Sprintf("mkdir -p /run/read-only; mount --bind %[1]s /run/read-only; mount -o remount,bind,ro /run/read-only; mount --bind /run/read-only %[1]s", stateDir))
	writable := false
	defer func() {
		if !writable {
			w.on(t, badNode, "umount", "-l", stateDir)
		}
	}()

	w.apply(t, ns, claimYAML("new", "")+podOnClaim("refused", badNode, "new")+podOnNothing("no-gpu", badNode))
	w.refused(t, ns, "refused", "read-only file system", stateDir, "claim "+ns+"/new")
	w.running(t, ns, "before", "no-gpu")
	if _, err := w.Kubectl(t.Context(), "-n", ns, "delete", "pod", "before", "--wait=false"); err != nil {
		t.Fatal(err)
	}
	eventually(t, 60*time.Second, "the claim's Events say why its device is not given back", func() (bool, string) {
		events := w.events(t, ns, "held")
		return strings.Contains(events, "UnprepareFailed") && strings.Contains(events, "read-only file system"), events
	})

	// A plugin that starts now says in one line why it cannot, and ends. What was published stays.
	old := w.livePlugin(t, badNode)
	w.deletePlugin(t, old)
	eventually(t, 60*time.Second, "the next plugin ends with one clear error", func() (bool, string) {
		return w.lastWords(t, old.UID, "state cannot be written to", "read-only file system")
	})
	if got := len(w.gpus(t, badNode)); got != badGPUs {
		t.Errorf("the node offers %d devices, want %d", got, badGPUs)
	}

	w.on(t, badNode, "umount", "-l", stateDir)
	writable = true
	w.running(t, ns, "refused")
	w.givenBack(t, ns)
}

// lastWords looks for a plugin on the bad node, other than the old one, that ended with an error that has these texts.
func (w *world) lastWords(t *testing.T, old types.UID, texts ...string) (bool, string) {
	t.Helper()
	state := "no plugin"
	for _, p := range w.instances(t, badNode) {
		if p.UID == old || len(p.Status.ContainerStatuses) == 0 {
			continue
		}
		s := p.Status.ContainerStatuses[0]
		for _, ended := range []*corev1.ContainerStateTerminated{s.State.Terminated, s.LastTerminationState.Terminated} {
			if ended == nil {
				continue
			}
			state = fmt.Sprintf("exit code %d: %s", ended.ExitCode, ended.Message)
			if ended.ExitCode != 0 && containsAll(ended.Message, texts...) {
				return true, ""
			}
		}
	}
	return false, state
}

func containsAll(text string, parts ...string) bool {
	return !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(text, p) })
}

// refused waits until an Event of the Pod has the driver's error, with all these texts in it.
func (w *world) refused(t *testing.T, namespace, pod string, texts ...string) {
	t.Helper()
	eventually(t, 60*time.Second, fmt.Sprintf("an Event of Pod %s says %q", pod, texts), func() (bool, string) {
		events := w.events(t, namespace, pod)
		return slices.ContainsFunc(strings.Split(events, "\n"), func(e string) bool {
			return strings.HasPrefix(e, "FailedPrepareDynamicResources: ") && containsAll(e, texts...)
		}), events
	})
	p, err := w.Client.CoreV1().Pods(namespace).Get(t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if p.Status.Phase != corev1.PodPending {
		t.Errorf("Pod %s is %s although its claim was refused", pod, p.Status.Phase)
	}
}

// testEverythingIsFree lets one Pod have every GPU, after all that went wrong: none is stuck.
func (w *world) testEverythingIsFree(t *testing.T) {
	ns := w.namespace(t)
	w.apply(t, ns, strings.Replace(claimYAML("all", ""), "count: 1", "allocationMode: All", 1)+podOnClaim("all", badNode, "all"))
	w.running(t, ns, "all")
	if cards := strings.Fields(w.mustExec(t, ns, "all", "", "sh", "-c", "ls -d /dev/nvidia[0-9]*")); len(cards) != badGPUs {
		t.Errorf("the Pod that claims all GPUs has %q, want %d", cards, badGPUs)
	}
	w.givenBack(t, ns)
}

// givenBack ends all Pods of the namespace and makes sure that their claims leave nothing on the node.
func (w *world) givenBack(t *testing.T, namespace string) {
	t.Helper()
	w.deletePods(t, namespace)
	w.nothingIsLeft(t)
}

// nothingIsLeft makes sure that the driver keeps nothing of any claim on the node, and counts none.
func (w *world) nothingIsLeft(t *testing.T) {
	t.Helper()
	w.clean(t, badNode)
	eventually(t, 30*time.Second, "the metrics count no claim", func() (bool, string) {
		metrics := w.get(t, badNode, "metrics")
		return containsAll(metrics, "gpu_dra_prepared_claims 0\n", "gpu_dra_held_gpus 0\n"), metrics
	})
}

// leftNothing makes sure that a claim has neither record nor spec, nor half of one.
func (w *world) leftNothing(t *testing.T, uid string) {
	t.Helper()
	for _, file := range w.claimFiles(t) {
		if strings.Contains(file, uid) && !strings.Contains(file, "/locks/") { // the kubelet's next try may have begun
			t.Errorf("%s is left", file)
		}
	}
}

func (w *world) claimFiles(t *testing.T) []string {
	t.Helper()
	return strings.Fields(w.on(t, badNode, "sh", "-c", fmt.Sprintf("ls -A -d %[1]s/claims/* %[1]s/claims/.[!.]* %[1]s/locks/claim-* /var/run/cdi/*claim* 2>/dev/null; true", stateDir)))
}

func (w *world) deletePods(t *testing.T, namespace string, pods ...string) {
	t.Helper()
	if len(pods) == 0 {
		pods = []string{"--all"}
	}
	if _, err := w.Kubectl(t.Context(), append([]string{"-n", namespace, "delete", "--timeout=90s", "pod"}, pods...)...); err != nil {
		t.Fatalf("delete Pods: %v", err)
	}
}

func (w *world) deletePlugin(t *testing.T, p corev1.Pod) {
	t.Helper()
	if _, err := w.Kubectl(t.Context(), "-n", p.Namespace, "delete", "pod", p.Name, "--wait=false"); err != nil {
		t.Fatal(err)
	}
}

// handAllocate makes a claim that an administrator allocated by hand.
func (w *world) handAllocate(t *testing.T, namespace, name, pool string, devices ...string) {
	t.Helper()
	claims := w.Client.ResourceV1().ResourceClaims(namespace)
	claim, err := claims.Create(t.Context(), &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{resourceapi.Finalizer}},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com", Count: int64(len(devices)), AllocationMode: resourceapi.DeviceAllocationModeExactCount},
		}}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// With a timestamp: the scheduler would add one and be refused, because what is allocated cannot be changed.
	claim.Status.Allocation = &resourceapi.AllocationResult{AllocationTimestamp: ptr.To(metav1.Now())}
	for _, d := range devices {
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: "gpu.nvidia.com", Pool: pool, Device: d})
	}
	if _, err := claims.UpdateStatus(t.Context(), claim, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func (w *world) claimNamed(t *testing.T, namespace, name string) *resourceapi.ResourceClaim {
	t.Helper()
	claim, err := w.Client.ResourceV1().ResourceClaims(namespace).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return claim
}

func (w *world) uidOf(t *testing.T, namespace, claim string) string {
	t.Helper()
	return string(w.claimNamed(t, namespace, claim).UID)
}

// allocated is the claim's first device.
func (w *world) allocated(t *testing.T, namespace, claim string) string {
	t.Helper()
	c := w.claimNamed(t, namespace, claim)
	if c.Status.Allocation == nil {
		t.Fatalf("claim %s is not allocated", claim)
	}
	return c.Status.Allocation.Devices.Results[0].Device
}

func (w *world) recordOf(t *testing.T, namespace, claim string) string {
	t.Helper()
	return fmt.Sprintf("%s/claims/%s_%s.json", stateDir, w.uidOf(t, namespace, claim), w.allocated(t, namespace, claim))
}

// freeDevices are all devices of the bad node, sorted.
func (w *world) freeDevices(t *testing.T) []string {
	t.Helper()
	var names []string
	for name := range w.gpus(t, badNode) {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// write replaces a file's content on a node.
func (w *world) write(t *testing.T, node, file, content string) {
	t.Helper()
	if err := w.node(t, node).ExecStreams(t.Context(), strings.NewReader(content), nil, nil, "sh", "-c", `cat > "$0"`, file); err != nil {
		t.Fatalf("write %s on %s: %v", file, node, err)
	}
}

// pciAddress is where the device of that name sits: gpu-0000-1b-00-0 at 0000:1b:00.0.
func pciAddress(device string) string {
	p := strings.Split(strings.TrimPrefix(device, "gpu-"), "-")
	return fmt.Sprintf("%s:%s:%s.%s", p[0], p[1], p[2], p[3])
}

func gpuConfig(rest string) string {
	return "{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, " + rest + "}"
}

// claimYAML is a claim for one GPU, with opaque parameters unless they are empty.
func claimYAML(name, parameters string) string {
	config := ""
	if parameters != "" {
		config = "\n    config: [{requests: [gpu], opaque: {driver: gpu.nvidia.com, parameters: " + parameters + "}}]"
	}
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata:
  name: %s
spec:
  devices:
    requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, count: 1}}]%s
---
`, name, config)
}

// podOn is a Pod on a node with a GPU of its own, by a template of the same name.
func podOn(name, node string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata:
  name: %s
spec:
  spec:
    devices:
      requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, count: 1}}]
---
`, name) + podYAML(name, node, "\n  resourceClaims: [{name: gpu, resourceClaimTemplateName: "+name+"}]", "[{name: gpu}]")
}

// podOnClaim is a Pod on a node that uses a claim.
func podOnClaim(name, node, claim string) string {
	return podYAML(name, node, "\n  resourceClaims: [{name: gpu, resourceClaimName: "+claim+"}]", "[{name: gpu}]")
}

// podOnNothing is a Pod on a node that uses no claim.
func podOnNothing(name, node string) string { return podYAML(name, node, "", "[]") }

func podYAML(name, node, claims, use string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata:
  name: %s
spec:
  nodeSelector: {kubernetes.io/hostname: %s}
  terminationGracePeriodSeconds: 1
  restartPolicy: Never%s
  containers:
    - name: main
      image: %s
      imagePullPolicy: Never
      command: [sh, -c, "trap 'exit 0' TERM; sleep 1000000 & wait"]
      resources: {claims: %s}
---
`, name, node, claims, cluster.TestImage, use)
}
