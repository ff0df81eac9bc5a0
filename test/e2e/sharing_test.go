package e2e

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
)

// The PCI addresses of eight equal GPUs, named by the GPUs' purposes in the sharing tests.
const (
	fractioned = "0000:1b:00.0" // shared in MPS fractions
	timeSliced = "0000:43:00.0" // shared in three plain shares
	cutShares  = "0000:52:00.0" // its partitions 1g.10gb in fractions, 2g.20gb in plain shares
	whole1     = "0000:61:00.0"
	whole2     = "0000:9d:00.0"
	whole3     = "0000:c3:00.0"
	whole4     = "0000:d1:00.0"
	staticGPU  = "0000:df:00.0" // partitioned by an admin
)

// shareRules is the chart's value "shares".
var shareRules = []string{
	fractions(fractioned, ""), plainShares(timeSliced, "", 3), fractions(cutShares, "1g.10gb"), plainShares(cutShares, "2g.20gb", 2),
}

// fractions returns a rule that shares these GPUs, or their partitions of this profile, in
// fractions.
func fractions(gpus, profile string) string {
	return fmt.Sprintf(`{"gpus":%q,"profile":%q,"kind":"fractions"}`, gpus, profile)
}

// plainShares returns a rule that shares these GPUs, or their partitions of this profile, in plain
// shares.
func plainShares(gpus, profile string, count int) string {
	return fmt.Sprintf(`{"gpus":%q,"profile":%q,"kind":"shares","count":%d}`, gpus, profile, count)
}

// sharesValue returns the chart's value "shares" with these rules, for helm's --set-json.
func sharesValue(rules ...string) string { return "shares=[" + strings.Join(rules, ",") + "]" }

// TestSharing lets several containers, Pods and claims use one GPU or MIG device, in every way of
// sharing.
func TestSharing(t *testing.T) {
	t.Parallel()
	w := bringUp(t, "e2e-sharing", simulator(t).Node(h100, *nodeFile), nodeOfSmallDisk(t))
	w.needSMI(t)
	// Without persistence mode the NVIDIA driver would forget compute mode and time slice once no
	// process has the GPU open.
	w.smi(t, h100, "-pm", "1")
	w.install(
		t,
		"--set",
		"mps.enabled=true",
		"--set-json",
		sharesValue(shareRules...),
		"--set",
		"deviceClasses.shared.extendedResourceName=nvidia.com/gpu.shared",
	)
	w.offers(t, h100, 8)
	bare := w.settings(t)

	t.Run("a Pod ends that filled the disk, though it shares a GPU", w.testFilledDisk)
	t.Run("containers of one claim get time slices of the requested length", w.testIntervals)
	t.Run("claims that share a GPU agree on the time slice, and the last one restores it", w.testSharedInterval)
	t.Run("four Pods with 18 GiB share a GPU, a fifth waits, and a whole claim waits for all", w.testFractions)
	t.Run("the first share creates its partition and the last removes it", w.testSharedPartitions)
	t.Run("unsupported sharing is refused with the reason", w.testRefusedSharing)
	t.Run("MPS on a GPU, an admin's MIG device and one on demand at the same time", w.testMPS)
	t.Run("a daemon that does not start delays its own claim only", w.testHangingDaemon)
	t.Run("a plugin killed during Prepare leaves nothing unfinished", w.testKilledWhilePreparing)
	t.Run("MPS can be switched off while claims use it, and on again", w.testMPSSwitchedOff)
	t.Run("daemons outlive the plugin, and come back after their own end", w.testDaemonsOutlive)
	t.Run("every Pod has its share again after a power cut", w.testSharingPowerCut)
	t.Run("the examples work", w.testSharingExamples)
	t.Run("nothing is left on the node", func(t *testing.T) {
		w.uncut(t, h100)
		w.unshared(t)
		if now := w.settings(t); now != bare {
			t.Errorf("the GPUs were\n%s\nand are\n%s", bare, now)
		}
		w.clean(t, h100)
	})
	t.Run("an uninstallation removes the daemons' host", w.testSharingUninstalled)
}

// ofGPU returns a CEL expression for the devices of the GPU at this PCI address.
func ofGPU(address string) string {
	return fmt.Sprintf(`device.attributes["resource.kubernetes.io"].pciBusID == %q`, address)
}

// shared returns a claim for one device of this DeviceClass on the GPU at this PCI address. The
// text in rest is added to the request, and config is the claim's opaque parameters. Both may be
// empty.
func shared(class, address, rest, config string) string {
	if rest != "" {
		rest = ", " + rest
	}
	if config != "" {
		config = "\nconfig: [{requests: [one], opaque: {driver: gpu.nvidia.com, parameters: " + config + "}}]"
	}
	return fmt.Sprintf(
		"requests: [{name: one, exactly: {deviceClassName: %s, selectors: [{cel: {expression: %q}}]%s}}]%s",
		class,
		ofGPU(address),
		rest,
		config,
	)
}

func migConfig(rest string) string {
	return "{apiVersion: resource.nvidia.com/v1beta1, kind: MigDeviceConfig, " + rest + "}"
}

func slicing(interval string) string {
	return gpuConfig("sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: " + interval + "}}")
}

// timeSlice returns the time slice interval of the GPU at this PCI address, as nvidia-smi shows it.
func (w *world) timeSlice(t *testing.T, address string) string {
	t.Helper()
	out := w.smi(t, h100, "compute-policy", "-i", w.index(t, address), "--list")
	for line := range strings.Lines(out) {
		if words := strings.Fields(strings.ReplaceAll(line, "|", " ")); len(words) == 3 && words[1] == "Timeslice" {
			return words[2]
		}
	}
	t.Fatalf("no time slice in\n%s", out)
	return ""
}

func (w *world) setTimeSlice(t *testing.T, address string, value int) {
	t.Helper()
	if out := w.smi(t, h100, "compute-policy", "-i", w.index(t, address), fmt.Sprintf("--set-timeslice=%d", value)); !strings.Contains(
		out,
		"Successfully",
	) {
		t.Fatal(out)
	}
}

// index returns nvidia-smi's index of the GPU at this PCI address. nvidia-smi counts GPUs by PCI
// address.
func (w *world) index(t *testing.T, address string) string {
	t.Helper()
	all := []string{fractioned, timeSliced, cutShares, whole1, whole2, whole3, whole4, staticGPU}
	return fmt.Sprint(slices.Index(all, address))
}

var computeModeForm = regexp.MustCompile(`Compute Mode\s*: (\S+)`)

// computeMode returns the compute mode of the GPU at this PCI address, as nvidia-smi shows it.
func (w *world) computeMode(t *testing.T, address string) string {
	t.Helper()
	out := w.smi(t, h100, "-i", w.index(t, address), "-q", "-d", "COMPUTE")
	m := computeModeForm.FindStringSubmatch(out)
	if m == nil {
		t.Fatalf("no compute mode in\n%s", out)
	}
	return m[1]
}

// settings returns the compute modes and time slices of all GPUs, as text to compare.
func (w *world) settings(t *testing.T) string {
	t.Helper()
	return strings.Join(
		computeModeForm.FindAllString(w.smi(t, h100, "-q", "-d", "COMPUTE"), -1),
		"\n",
	) + "\n" + w.smi(
		t,
		h100,
		"compute-policy",
		"--list",
	)
}

// unshared waits until the node has no MPS daemon, and no mount, directory or file that the driver
// creates for shared devices.
func (w *world) unshared(t *testing.T) {
	t.Helper()
	const left = `
ls "$1/mps" | grep -v -e '^supervisor' || true
ls "$1/state/holders" 2>/dev/null || true
grep -h gpu.nvidia.com/mps/ /proc/1/mountinfo || true
grep -l nvidia-cuda-mps /proc/[0-9]*/comm 2>/dev/null || true`
	eventually(t, 30*time.Second, "nothing of shared devices is left on the node", func() (bool, string) {
		out := strings.TrimSpace(w.on(t, h100, "sh", "-c", left, "sh", pluginDir))
		return out == "", out
	})
}

// unset waits until the GPU at this PCI address has the default compute mode again, and the time
// slice interval that the parameter slice names.
func (w *world) unset(t *testing.T, address, slice string) {
	t.Helper()
	eventually(t, 30*time.Second, "GPU "+address+" is as it was before it was shared", func() (bool, string) {
		now := w.computeMode(t, address) + " " + w.timeSlice(t, address)
		return now == "Default "+slice, now
	})
}

// mpsVariables returns a container's CUDA_ variables, which configure MPS, sorted.
func (u tenant) mpsVariables(pod, container string) string {
	u.t.Helper()
	return strings.TrimSpace(u.sh(pod, container, "env | grep ^CUDA_ | sort"))
}

// asksDaemon sends a command from a container to the container's MPS daemon and returns the answer.
func (u tenant) asksDaemon(pod, container, order string) string {
	u.t.Helper()
	return strings.TrimSpace(u.sh(pod, container, "echo "+order+" | nvidia-cuda-mps-control"))
}

// computed is a line that nvmlsim-cuda prints. That program behaves like a CUDA program that
// computes on the simulated GPU.
type computed struct {
	Event   string `json:"event"`
	Mode    string `json:"mode"`
	Server  int    `json:"server"`
	MiB     uint64 `json:"mib"`
	Error   string `json:"error"`
	Message string `json:"message"`
	Devices []struct {
		UUID    string  `json:"uuid"`
		Limit   uint64  `json:"memoryLimitMiB"`
		Threads float64 `json:"threadPercentage"`
	} `json:"devices"`
}

// computes runs a program that allocates all the GPU memory that it can get, and ends. The result
// says how the program attached to the GPU and how much memory it got.
func (u tenant) computes(pod, container string) computed {
	u.t.Helper()
	out, err := u.exec(u.t, u.namespace, pod, container, "nvidia-cuda-mps-control", "nvmlsim-cuda", "--fill")
	lines := said(u.t, out)
	// Skip the report with the event pending: the first client of an MPS daemon waits for the MPS
	// server to start.
	lines = slices.DeleteFunc(lines, func(l computed) bool { return l.Event == "pending" })
	if err != nil || len(lines) != 2 || lines[0].Event != "attached" || lines[1].Event != "filled" {
		u.t.Fatalf("a program in Pod %s: %v\n%s", pod, err, out)
	}
	lines[0].MiB = lines[1].MiB
	return lines[0]
}

func said(t *testing.T, text string) []computed {
	t.Helper()
	var all []computed
	for line := range strings.Lines(text) {
		var l computed
		if strings.HasPrefix(line, "{") {
			if err := json.Unmarshal([]byte(line), &l); err != nil {
				t.Fatalf("%v in %s", err, line)
			}
			all = append(all, l)
		}
	}
	return all
}

// keepsComputing starts a program that computes until its container ends, and returns the program's
// report once it has attached to the GPU.
func (u tenant) keepsComputing(pod, container string) computed {
	u.t.Helper()
	u.sh(pod, container, "nvidia-cuda-mps-control nvmlsim-cuda --hold >/tmp/computes 2>&1 &")
	var now computed
	eventually(u.t, 20*time.Second, "a program in Pod "+pod+" computes", func() (bool, string) {
		out := u.sh(pod, container, "cat /tmp/computes")
		lines := said(u.t, out)
		if len(lines) < 2 || lines[len(lines)-1].Event != "holding" {
			return false, out
		}
		now = lines[len(lines)-2]
		return true, ""
	})
	return now
}

// stillComputes checks that the program that keepsComputing has started was not disturbed.
func (u tenant) stillComputes(pod, container string) {
	u.t.Helper()
	if out := u.sh(pod, container, "cat /tmp/computes"); !strings.HasSuffix(strings.TrimSpace(out), `{"event":"holding"}`) {
		u.t.Errorf("the program in Pod %s was disturbed:\n%s", pod, out)
	}
}

// daemon is the supervisor's report of one MPS daemon.
type daemon struct {
	Daemon struct {
		ID string `json:"id"`
	} `json:"daemon"`
	State    string `json:"state"`
	PID      int    `json:"pid"`
	Restarts int    `json:"restarts"`
}

// supervisor returns the Pod of the supervisor of MPS daemons on the node h100, once it is ready.
func (w *world) supervisor(t *testing.T) corev1.Pod {
	t.Helper()
	var found corev1.Pod
	eventually(t, 90*time.Second, "the supervisor of MPS daemons is ready", func() (bool, string) {
		list, err := w.Client.CoreV1().
			Pods(clusterharness.Namespace).
			List(t.Context(), metav1.ListOptions{
				LabelSelector: "app.kubernetes.io/component=mps-supervisor", FieldSelector: "spec.nodeName=" + h100,
			})
		if err != nil || len(list.Items) != 1 {
			return false, fmt.Sprint(err, len(list.Items))
		}
		found = list.Items[0]
		return isReady(&found), fmt.Sprintf("%+v", found.Status.ContainerStatuses)
	})
	return found
}

// daemons returns the MPS daemons that the supervisor reports, by ID.
func (w *world) daemons(t *testing.T) map[string]daemon {
	t.Helper()
	var list []daemon
	eventually(t, 60*time.Second, "the supervisor lists its MPS daemons", func() (bool, string) {
		p := w.supervisor(t)
		out, err := w.exec(t, p.Namespace, p.Name, "", "/usr/bin/gpu-mps", "status", "--plugin-dir="+pluginDir)
		if err != nil {
			return false, out
		}
		if err := json.Unmarshal([]byte(out), &list); err != nil {
			t.Fatalf("%v in\n%s", err, out)
		}
		return true, ""
	})
	all := map[string]daemon{}
	for _, d := range list {
		all[d.Daemon.ID] = d
	}
	return all
}

func (w *world) testIntervals(t *testing.T) {
	u := w.tenant(t)
	u.template("unasked", shared("gpu.nvidia.com", timeSliced, "", ""))
	w.setTimeSlice(t, timeSliced, 1)
	intervals := map[string]string{"Default": whole1, "Short": whole2, "Medium": whole3, "Long": whole4}
	found := map[string]string{"Default": "Long", "Short": "Default", "Medium": "Default", "Long": "Medium"}
	w.setTimeSlice(t, whole1, 3)
	w.setTimeSlice(t, whole4, 2)
	two := func(p *corev1.Pod) { container("one", "gpu")(p); container("two", "gpu")(p) }
	var pods []string
	for interval, address := range intervals {
		name := strings.ToLower(interval)
		u.template(name, shared("gpu.nvidia.com", address, "", slicing(interval)))
		u.pod(name, onNode(h100), fromTemplate("gpu", name), two)
		pods = append(pods, name)
	}
	u.pod("unasked", onNode(h100), fromTemplate("gpu", "unasked"), two)
	u.running(append(pods, "unasked")...)
	for interval, address := range intervals {
		if now := w.timeSlice(t, address); now != interval {
			t.Errorf("the time slice is %s, want %s", now, interval)
		}
		pod := strings.ToLower(interval)
		given := u.allocated(pod, "gpu")
		u.sees(pod, "one", given)
		u.sees(pod, "two", given)
	}
	if now := w.timeSlice(t, timeSliced); now != "Short" {
		t.Errorf("a claim without parameters changed the time slice to %s", now)
	}
	w.endPods(t, u.namespace)
	for interval, address := range intervals {
		w.unset(t, address, found[interval])
		w.setTimeSlice(t, address, 0)
	}
	w.unset(t, timeSliced, "Short")
	w.setTimeSlice(t, timeSliced, 0)
}

// testSharedInterval lets Pods a and b share a GPU with one time slice interval. Pod c, which wants
// another interval, must be refused until a and b have ended.
func (w *world) testSharedInterval(t *testing.T) {
	u := w.tenant(t)
	w.setTimeSlice(t, timeSliced, 2)
	for _, interval := range []string{"Long", "Short"} {
		u.template(strings.ToLower(interval), shared("shared.gpu.nvidia.com", timeSliced, "", slicing(interval)))
	}
	u.template("unasked", shared("shared.gpu.nvidia.com", timeSliced, "", ""))
	for _, pod := range []string{"a", "b"} {
		u.pod(pod, onNode(h100), fromTemplate("gpu", "long"))
		u.running(pod)
	}
	if u.allocated("a", "gpu")[0] != u.allocated("b", "gpu")[0] {
		t.Error("Pods a and b do not share a GPU")
	}
	u.pod("c", onNode(h100), fromTemplate("gpu", "short"))
	w.refused(t, u.namespace, "c", "Short", u.claimOf(t, u.namespace, "a", "gpu").Name, u.claimOf(t, u.namespace, "b", "gpu").Name)
	u.pod("fourth", onNode(h100), fromTemplate("gpu", "unasked"))
	u.waits("fourth")
	w.deletePods(t, u.namespace, "a")
	u.running("fourth")
	if now := w.timeSlice(t, timeSliced); now != "Long" {
		t.Errorf("the time slice is %s while a claim with Long is left", now)
	}
	w.deletePods(t, u.namespace, "b")
	u.running("c")
	if now := w.timeSlice(t, timeSliced); now != "Short" {
		t.Errorf("the time slice is %s while a claim with Short is left", now)
	}
	w.endPods(t, u.namespace)
	w.unset(t, timeSliced, "Medium")
	w.setTimeSlice(t, timeSliced, 0)
}
