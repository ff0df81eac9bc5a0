package e2e

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// The GPU that a virtual machine has in TestPassthroughFaults, and one of another virtual machine.
const machineGPU, otherMachineGPU = "0000:1b:00.0", "0000:43:00.0"

// TestPassthroughFaults lets things go wrong while virtual machines have GPUs. After each the PCI
// functions are as before.
func TestPassthroughFaults(t *testing.T) {
	t.Parallel()
	w := bringUp(t, "e2e-vmfaults", passthroughNode(t))
	w.needSMI(t)
	before := w.pciFunctions(t)
	w.install(t, "--set", "passthrough.enabled=true")
	for _, c := range []struct {
		name string
		test func(tenant)
	}{
		{"a Pod that waits for the GPU gets it at the first try", tenant.testNextHasTheGPUWhole},
		{"a write that hangs costs one GPU", tenant.testHungWrites},
		{"a missing module", tenant.testMissingModule},
		{"the driver is reloaded", tenant.testReloadUnderMachine},
		{"a lost record", tenant.testLostRecord},
		{"uninstallation", tenant.testUninstallUnderMachine},
	} {
		t.Run(c.name, func(t *testing.T) {
			u := w.tenant(t)
			u.template("vm", device("vfio.gpu.nvidia.com", machineGPU, ""))
			c.test(u)
			w.endPods(t, u.namespace)
			eventually(t, 30*time.Second, "all PCI functions have their drivers again", func() (bool, string) {
				now := w.pciFunctions(t)
				return now == before, "was\n" + before + "is\n" + now
			})
		})
	}
}

// machine starts a virtual machine's Pod with the claim template.
func (u tenant) machine(pod, template string) {
	u.t.Helper()
	u.pod(pod, onNode(h100), fromTemplate("gpu", template), lasting)
}

// driver returns the driver of a PCI function.
func (w *world) driver(t *testing.T, address string) string {
	t.Helper()
	return strings.TrimSpace(w.on(t, h100, "sh", "-c", "basename $(readlink "+functionPath(address)+"/driver)"))
}

func (u tenant) testNextHasTheGPUWhole() {
	u.template("whole", device("gpu.nvidia.com", machineGPU, ""))
	u.machine("vm", "vm")
	u.running("vm")
	eventually(u.t, 20*time.Second, "the inventory has noticed that the GPU left NVIDIA's driver", func() (bool, string) {
		log := u.logOf(u.t, h100)
		return strings.Contains(log, `"GPU is not offered, or only in part" gpu="`+machineGPU), log
	})
	u.pod("next", onNode(h100), fromTemplate("gpu", "whole"))
	u.waits("next")
	u.delete("vm")
	u.running("next")
	u.sees("next", "", u.allocated("next", "gpu"))
	if events := u.events(u.t, u.namespace, "next"); strings.Contains(events, "FailedPrepare") {
		u.t.Errorf("Prepare failed at first:\n%s", events)
	}
}

// testHungWrites lets the write that takes the GPU from a driver hang after its effect, as it does
// while a process uses the GPU that no one sees.
func (u tenant) testHungWrites() {
	t := u.t
	hang := func() { u.nvmlsim(t, h100, "slow", "sysfsUnbind@"+machineGPU, "1h", "--after") }
	others := func(name string) {
		t.Helper()
		u.template("vm-"+name, device("vfio.gpu.nvidia.com", otherMachineGPU, ""))
		u.template("whole-"+name, device("gpu.nvidia.com", "0000:52:00.0", ""))
		u.machine("vm-"+name, "vm-"+name)
		u.pod("whole-"+name, onNode(h100), fromTemplate("gpu", "whole-"+name))
		u.running("vm-"+name, "whole-"+name)
		u.sees("whole-"+name, "", u.allocated("whole-"+name, "gpu"))
		for _, pod := range []string{"vm-" + name, "whole-" + name} {
			u.delete(pod)
			u.gone(pod)
		}
	}
	hung := regexp.MustCompile(`the kernel has not answered the attempt to .* gpu-0000-1b-00-0 \(process [0-9]+\)`)
	says := func(what, object string) {
		t.Helper()
		eventually(t, 60*time.Second, what, func() (bool, string) {
			events := u.events(t, u.namespace, object)
			return hung.MatchString(events), events
		})
	}

	hang()
	u.machine("vm", "vm")
	says("the Pod's Event names the process that hangs", "vm")
	others("during-bind")
	u.nvmlsim(t, h100, "clear")
	u.running("vm")
	if driver := u.driver(t, machineGPU); driver != "vfio-pci" {
		t.Errorf("afterwards driver %s has the GPU", driver)
	}

	hang()
	claim := u.claimOf(t, u.namespace, "vm", "gpu").Name
	u.delete("vm")
	says("the claim's Event names the process that hangs", claim)
	others("during-release")
	if log := u.logOf(t, h100); !hung.MatchString(log) {
		t.Error("the log does not name the process that hangs")
	}
	u.nvmlsim(t, h100, "clear")
	u.gone("vm")
}

// testMissingModule unloads the module with the VFIO driver while no virtual machine has a GPU.
func (u tenant) testMissingModule() {
	t := u.t
	offers := func(want int) {
		t.Helper()
		eventually(t, 30*time.Second, fmt.Sprintf("virtual machines are offered %d GPUs", want), func() (bool, string) {
			got := 0
			for name := range u.devices(t, h100) {
				if strings.HasSuffix(name, "-vfio") {
					got++
				}
			}
			return got == want, fmt.Sprint(got)
		})
	}
	const reason = "kernel module vfio_pci is not loaded"
	offers(8)
	u.nvmlsim(t, h100, "vfio", "unload")
	offers(0)
	u.offers(t, h100, 8)
	u.nodeHears(t, h100, "GPUsLimited", "gpu-0000-1b-00-0", reason, "modprobe vfio_pci")
	if log := u.logOf(t, h100); !strings.Contains(log, reason) {
		t.Error("the log lacks the reason")
	}
	if inventory, err := u.inventoryOf(t, h100); err != nil || !strings.Contains(inventory, reason) {
		t.Errorf("%v, inventory\n%s", err, inventory)
	}
	u.machine("vm", "vm")
	u.waits("vm")
	u.nvmlsim(t, h100, "vfio", "load")
	offers(8)
	u.running("vm")
}

// testReloadUnderMachine loads NVIDIA's driver anew while a virtual machine has a GPU.
func (u tenant) testReloadUnderMachine() {
	t := u.t
	u.machine("vm", "vm")
	u.running("vm")
	container := u.containers([]string{"vm"})
	u.release(t, true)
	eventually(t, 60*time.Second, "the driver can be unloaded", func() (bool, string) {
		_, err := u.node(t, h100).Exec(t.Context(), u.sim.Tool, "--root", clusterharness.NodeRoot, "driver", "reload")
		return err == nil, fmt.Sprint(err)
	})
	u.release(t, false)
	u.gpus(7)
	u.holder("all-others", 7, onNode(h100))
	u.running("all-others")
	if seen := u.visible("all-others", ""); len(seen) != 7 {
		t.Errorf("the Pod with all other GPUs sees %q", seen)
	}
	if driver := u.driver(t, machineGPU); driver != "vfio-pci" {
		t.Errorf("driver %s has the virtual machine's GPU", driver)
	}
	if taints := u.taints(t, h100); len(taints) > 0 {
		t.Errorf("devices are tainted: %v", taints)
	}
	if now := u.containers([]string{"vm"}); now["vm"] != container["vm"] {
		t.Error("the virtual machine's container was restarted")
	}
}

// commandsOf matches the commands with which an admin gives a GPU back, in an Event.
var commandsOf = regexp.MustCompile(`echo > /sys/bus/pci/devices/A/driver_override && .* > /sys/bus/pci/drivers_probe`)

// testLostRecord destroys the record of a virtual machine's claim. Then nothing tells which drivers
// the GPU's functions had. An Event says what an admin has to do.
func (u tenant) testLostRecord() {
	t := u.t
	u.machine("vm", "vm")
	u.running("vm")
	claim := u.claimOf(t, u.namespace, "vm", "gpu")
	u.on(t, h100, "sh", "-ec", fmt.Sprintf("for f in %s/state/claims/%s_*; do echo broken >$f; done", pluginDir, claim.UID))
	u.delete("vm")
	u.gone("vm")
	u.nodeHears(t, h100, "GPUsLimited", "gpu-0000-1b-00-0: a VFIO driver has the GPU and no claim does")
	if inventory, err := u.inventoryOf(t, h100); err != nil || !strings.Contains(inventory, "gpu-0000-1b-00-0: bound to VFIO by no claim") {
		t.Errorf("%v, inventory\n%s", err, inventory)
	}
	u.machine("another", "vm")
	u.running("another")
	u.delete("another")
	u.gone("another")
	commands := commandsOf.FindString(u.events(t, corev1.NamespaceDefault, h100))
	ours := strings.NewReplacer("/sys/", clusterharness.NodeRoot+"/sys/", "/A/", "/"+machineGPU+"/", "echo A", "echo "+machineGPU)
	u.on(t, h100, "sh", "-ec", ours.Replace(commands))
	u.template("whole", device("gpu.nvidia.com", machineGPU, ""))
	u.pod("whole", onNode(h100), fromTemplate("gpu", "whole"))
	u.running("whole")
	u.on(t, h100, "sh", "-c", "rm -r "+pluginDir+"/state/quarantine")
}

// testUninstallUnderMachine expects that the driver stays until the virtual machine has ended.
func (u tenant) testUninstallUnderMachine() {
	t := u.t
	u.machine("vm", "vm")
	u.running("vm")
	container, claim := u.containers([]string{"vm"}), u.claimOf(t, u.namespace, "vm", "gpu")
	out, err := u.uninstall(t)
	if err == nil {
		t.Fatalf("helm uninstalled the driver under a virtual machine:\n%s", out)
	}
	for _, want := range []string{claim.Namespace + "/" + claim.Name, "helm rollback", "--no-hooks"} {
		if !strings.Contains(out, want) {
			t.Errorf("helm's output lacks %q:\n%s", want, out)
		}
	}
	if driver := u.driver(t, machineGPU); driver != "vfio-pci" {
		t.Errorf("driver %s has the virtual machine's GPU", driver)
	}
	u.running("vm")
	if now := u.containers([]string{"vm"}); now["vm"] != container["vm"] {
		t.Error("the virtual machine's container was restarted")
	}
	u.delete("vm")
	u.gone("vm")
	if out, err := u.uninstall(t); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if n := len(u.instances(t, h100)); n != 0 {
		t.Errorf("%d plugins are left", n)
	}
}
