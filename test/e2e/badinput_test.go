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
)

const (
	badNode = "bad"
	badGPUs = 8

	stateDir = pluginDir + "/state"
)

// TestBadInput feeds the driver bad input from users, hand-made allocations, broken disks and
// vanished GPUs. The user must find an error for each fault in an Event or status, and other claims
// on the node must work.
func TestBadInput(t *testing.T) {
	t.Parallel()
	sim := simulator(t)
	node := sim.Node(badNode, "dgx-h100")
	// The driver's state directory is a small file system, so that a test can fill it.
	mountState := fmt.Sprintf(`"$@"; mkdir -p %[1]s; mount -t tmpfs -o size=256k,mode=700 state %[1]s`, stateDir)
	node.BootHook = append([]string{"/bin/sh", "-ec", mountState, "boot"}, node.BootHook...)
	w := start(t, "e2e-bad", node)
	w.offers(t, badNode, badGPUs)

	t.Run("OpaqueConfigTheAPIRefuses", w.testOpaqueConfigTheAPIRefuses)
	t.Run("EarlyRefusals", w.testEarlyRefusals)
	t.Run("OpaqueConfig", w.testOpaqueConfig)
	t.Run("OpaqueConfigThatNamesTheNode", w.testOpaqueConfigThatNamesTheNode)
	t.Run("UnknownDevice", w.testUnknownDevice)
	t.Run("VanishedDevice", w.testVanishedDevice)
	t.Run("BrokenRecords", w.testBrokenRecords)
	t.Run("FullDisk", w.testFullDisk)
	t.Run("ReadOnlyDisk", w.testReadOnlyDisk)
	t.Run("EverythingIsFree", w.testEverythingIsFree)
}

// The API server must refuse these opaque parameters before the driver sees them.
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
  config: [{opaque: {driver: gpu.nvidia.com, parameters: `+
		gpuConfig("sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 101}}")+`}}]
`)
	cases := map[string]struct {
		claim string
		says  []string
	}{
		"unknown-field": {claimYAML("unknown-field", gpuConfig("sharin: {}")), []string{"GpuConfig", `unknown field "sharin"`, "spelling"}},
		"unknown-kind": {
			claimYAML("unknown-kind", "{apiVersion: resource.nvidia.com/v1beta1, kind: Gpu}"),
			[]string{`kind "Gpu"`, "GpuConfig, MigDeviceConfig, VfioDeviceConfig"},
		},
		"wrong-kind": {
			claimYAML("wrong-kind", "{apiVersion: resource.nvidia.com/v1beta1, kind: MigDeviceConfig}"),
			[]string{"is a MigDeviceConfig", "needs a GpuConfig"},
		},
		"wrong-type": {claimYAML("wrong-type", gpuConfig("sharing: 7")), []string{"wrong type"}},
		"unknown-strategy": {
			claimYAML("unknown-strategy", gpuConfig("sharing: {strategy: Luck}")),
			[]string{"sharing.strategy", "Luck", "TimeSlicing"},
		},
		"limit-of-none": {
			claimYAML("limit-of-none", gpuConfig("sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {'7': 1Gi}}}")),
			[]string{"defaultPerDevicePinnedMemoryLimit", "7"},
		},
		"bad-class": {
			strings.Replace(claimYAML("bad-class", ""), "gpu.nvidia.com", "badly-configured", 1),
			[]string{"the DeviceClass's configuration", "sharing.mpsConfig.defaultActiveThreadPercentage is 101"},
		},
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

// These opaque parameters try to reach files, devices or the environment of the node. The driver
// must refuse each of them.
func (w *world) testOpaqueConfigThatNamesTheNode(t *testing.T) {
	ns := w.namespace(t)
	cases := map[string]struct {
		claim string
		says  []string
	}{
		"host-path": {
			claimYAML("host-path", gpuConfig("hostPath: /etc, mounts: [{hostPath: /, containerPath: /host}]")),
			[]string{"GpuConfig", "unknown field"},
		},
		"device-node": {
			claimYAML("device-node", gpuConfig("deviceNodes: [{path: /dev/sda}]")),
			[]string{"GpuConfig", `unknown field "deviceNodes"`},
		},
		"environment": {
			claimYAML("environment", gpuConfig("env: [LD_PRELOAD=/x], hooks: [{hookName: createRuntime, path: /bin/sh}]")),
			[]string{"GpuConfig", "unknown field"},
		},
		"cdi-name": {
			claimYAML("cdi-name", gpuConfig("cdiDevices: [k8s.gpu.nvidia.com/base=driver]")),
			[]string{"GpuConfig", `unknown field "cdiDevices"`},
		},
		"pipe-directory": {
			claimYAML("pipe-directory", gpuConfig("sharing: {strategy: MPS, mpsConfig: {pipeDirectory: /etc}}")),
			[]string{`unknown field "`, "pipeDirectory"},
		},
		"path-as-a-gpu": {
			claimYAML("path-as-a-gpu", gpuConfig("sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {'../../etc': 1Gi}}}")),
			[]string{"defaultPerDevicePinnedMemoryLimit", "../../etc"},
		},
	}
	for name, c := range cases {
		w.apply(t, ns, c.claim+podOnClaim(name, badNode, name))
	}
	w.apply(t, ns, podOn("good", badNode))
	w.running(t, ns, "good")
	for name, c := range cases {
		w.refused(t, ns, name, append(c.says, "claim "+ns+"/"+name)...)
	}
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
		"unknown": {badNode, []string{"gpu-0000-ff-00-0"},
			[]string{"device gpu-0000-ff-00-0, which is not on this node", "it has " + device}},
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
	// A lost device must stay published, with a taint, while its claim holds it.
	eventually(t, 30*time.Second, "the device is tainted as lost", func() (bool, string) {
		taints := w.gpus(t, badNode)[device].Taints
		return slices.ContainsFunc(taints, func(t resourceapi.DeviceTaint) bool {
			return t.Key == "gpu.nvidia.com/gpu-lost" && t.Effect == resourceapi.DeviceTaintEffectNoSchedule
		}), fmt.Sprint(taints)
	})
	// The claim too-late has an allocation of the vanished device, as the scheduler may write it just
	// before the device vanishes. The test creates a new claim, because the kubelet does not call
	// Prepare again for a prepared one.
	w.handAllocate(t, ns, "too-late", badNode, device)
	w.apply(t, ns, podOnClaim("too-late", badNode, "too-late")+podOn("good", badNode))
	w.running(t, ns, "good")
	w.refused(t, ns, "too-late", "device "+device+", which cannot be prepared", "claim "+ns+"/too-late")
	w.counts(t, badNode, "prepare", "device")
	// The running Pod's claim must be unprepared although its device is gone.
	w.givenBack(t, ns)

	w.nvmlsim(t, badNode, "restore", pciAddress(device))
	w.nvmlsim(t, badNode, "driver", "reload", "--force")
	w.offers(t, badNode, badGPUs)
	w.handAllocate(t, ns, "again", badNode, device)
	w.apply(t, ns, podOnClaim("again", badNode, "again"))
	w.running(t, ns, "again")
	w.givenBack(t, ns)
}

// refused waits for an Event of the Pod that has the driver's Prepare error with all these texts,
// and checks that the Pod is pending.
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

// testEverythingIsFree starts one Pod with every GPU after all faults, to show that no GPU is
// stuck.
func (w *world) testEverythingIsFree(t *testing.T) {
	ns := w.namespace(t)
	w.apply(t, ns, strings.Replace(claimYAML("all", ""), "count: 1", "allocationMode: All", 1)+podOnClaim("all", badNode, "all"))
	w.running(t, ns, "all")
	if cards := strings.Fields(w.mustExec(t, ns, "all", "", "sh", "-c", "ls -d /dev/nvidia[0-9]*")); len(cards) != badGPUs {
		t.Errorf("the Pod that claims all GPUs has %q, want %d", cards, badGPUs)
	}
	w.givenBack(t, ns)
}

// givenBack deletes all Pods of the namespace and waits until no file of any claim is left on the
// bad node and the plugin's metrics count no claim.
func (w *world) givenBack(t *testing.T, namespace string) {
	t.Helper()
	w.deletePods(t, namespace)
	w.nothingIsLeft(t)
}

// nothingIsLeft waits until the bad node has no file of any claim, and the plugin's metrics count
// no prepared claim and no GPU in use.
func (w *world) nothingIsLeft(t *testing.T) {
	t.Helper()
	w.clean(t, badNode)
	eventually(t, 30*time.Second, "the metrics count no claim", func() (bool, string) {
		metrics := w.get(t, badNode, "metrics")
		return containsAll(metrics, "gpu_dra_prepared_claims 0\n", "gpu_dra_held_gpus 0\n"), metrics
	})
}

// freeDevices returns the names of all whole GPUs of the bad node, sorted.
func (w *world) freeDevices(t *testing.T) []string {
	t.Helper()
	var names []string
	for name := range w.gpus(t, badNode) {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
