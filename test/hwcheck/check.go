package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

// visit is one run of hwcheck: it compares the project's model of GPUs with one machine.
type visit struct {
	options
	programs programs
	work     string
	progress io.Writer

	report facts.Report
	// last is when the last check ended.
	last time.Time
	// shown has the output of the programs that ran. The report quotes it.
	shown []printed
}

// endReserve is the part of the time limit that is left for ending a check and writing the report.
const endReserve = 30 * time.Second

type printed struct{ title, language, text string }

// check compares the model with the machine, writes the report to out, and returns the exit code.
// If the machine has no NVIDIA GPU, it writes only that. It returns an error if it could not start,
// or could not write the report.
func check(ctx context.Context, o options, out, progress io.Writer) (code int, err error) {
	fmt.Fprintf(progress, "%s\n\n", promise)
	s := &visit{options: o, progress: progress, last: time.Now()}
	s.report = facts.Report{Format: facts.CurrentFormat, Date: time.Now().UTC().Format(time.DateOnly), Machine: look(o)}
	places, empty := findPlaces(o)
	if len(s.report.Machine.PCI) == 0 && len(places) == 0 && len(deviceNodes("/dev")) == 0 {
		fmt.Fprintf(out, "There is no NVIDIA GPU on this machine: none on the PCI bus (%s), no /dev/nvidia*, "+
			"and no %s below any of %s. Nothing was checked.\n",
			filepath.Join(o.sysfs, "bus/pci/devices"), nvmlName, strings.Join(empty, ", "))
		return exitNoGPU, nil
	}
	if s.work, err = os.MkdirTemp("", "hwcheck-"); err != nil {
		return exitDiffered, fmt.Errorf("make a temporary folder: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(s.work)) }()
	// In a user namespace, hooks and the root file system belong to a user without rights here.
	if err := os.Chmod(s.work, 0o755); err != nil { //nolint:gosec // to be entered by everyone
		return exitDiffered, fmt.Errorf("open the temporary folder: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return exitDiffered, fmt.Errorf("find this program: %w", err)
	}
	if s.programs, err = unpack(self, s.work); err != nil {
		return exitDiffered, err
	}
	if s.models == "" {
		s.models = filepath.Join(filepath.Dir(self), "models")
	}
	version := s.programs.run(ctx, plugin, "version")
	if version.err != nil {
		return exitDiffered, fmt.Errorf("%s does not start here (it needs glibc 2.34 or later, "+
			"and TMPDIR must name a folder not mounted noexec): %s", plugin, version.summary())
	}
	s.report.Plugin = strings.TrimSpace(version.stdout)
	limited, cancel := context.WithTimeout(ctx, o.limit-endReserve)
	defer cancel()
	s.checkAll(limited, places, empty)
	if err := ctx.Err(); err != nil {
		return exitDiffered, fmt.Errorf("interrupted: %w", err)
	}
	if limited.Err() != nil {
		s.add("all checks ran", facts.Failed, "the limit of %s ended the last one, and later ones were left out", o.limit)
	}
	return s.finish(out)
}

func (s *visit) add(name string, verdict facts.Verdict, format string, args ...any) {
	now := time.Now()
	c := facts.Check{Name: name, Verdict: verdict, Detail: fmt.Sprintf(format, args...), Millis: now.Sub(s.last).Milliseconds()}
	s.last = now
	s.report.Checks = append(s.report.Checks, c)
	fmt.Fprintf(s.progress, "%-10s %s: %s\n", c.Verdict, c.Name, c.Detail)
}

func (s *visit) show(title, language, text string) {
	s.shown = append(s.shown, printed{title, language, strings.TrimRight(text, "\n")})
}

func (s *visit) checkAll(ctx context.Context, places []place, empty []string) {
	s.showPassthrough(ctx)
	s.ask(ctx, s.machineQuestions())
	specs := s.findDriver(ctx, places, empty)
	if s.report.Driver == nil {
		return
	}
	s.checkLibraries()
	s.ask(ctx, s.nvmlQuestions())
	// The watcher runs until the end, as the plugin's does. It keeps the GPUs open, so that the other
	// programs do not wait seconds for each of them.
	w := s.attachWatcher(ctx)
	s.checkNVML(ctx)
	s.checkGetters(ctx)
	offered := s.checkInventory(ctx)
	if specs != "" { // otherwise findDriver reported why
		if set := s.checkSpecs(specs, offered); set != nil && len(offered) > 0 {
			c := &containers{programs: s.programs, work: s.work, specs: set, libraries: driverLibraries(s.report.Driver)}
			s.checkListing(ctx, c, offered)
			s.checkTimeSlice(ctx, c, offered[0])
			s.checkCUDA(ctx, c, offered[0])
			s.checkMPS(ctx, c, offered[0])
			s.ask(ctx, s.containerQuestions(c, offered[0]))
		}
		s.checkScans(ctx, w)
	}
	s.endWatcher(w)
}

// showPassthrough adds to the report what sysfs says about passing each GPU to a virtual machine.
func (s *visit) showPassthrough(ctx context.Context) {
	args := []string{s.sysfs}
	for _, f := range s.report.Machine.PCI {
		args = append(args, f.Address)
	}
	result := s.programs.run(ctx, passthrough, args...)
	s.show("Passthrough to virtual machines, by sysfs", "", result.stdout+result.stderr)
}

// inventory runs "gpu-kubelet-plugin inventory" with the driver root at root. format is the value
// of its flag -o.
func (s *visit) inventory(ctx context.Context, root, format string) outcome {
	args := []string{
		"inventory", "-o", format, "--node-name=hwcheck", "--driver-root=" + root, "--sysfs-root=" + s.sysfs, "--proc-root=" + s.proc,
		"--hook-path=" + s.programs.path(hook),
	}
	if s.devRoot != "" {
		args = append(args, "--dev-root="+s.devRoot)
	}
	return s.programs.run(ctx, plugin, args...)
}

// findDriver chooses the driver root whose CDI specs have the most mounts, and returns these specs.
// If no root gives specs, it chooses the first with the NVML library. From / the plugin can find a
// library below /usr/local/nvidia, for example, but not the nvidia-smi next to it, or only a script
// that starts it. A root with such a script comes last.
func (s *visit) findDriver(ctx context.Context, places []place, empty []string) string {
	const name = "a driver is found"
	if len(places) == 0 {
		s.add(name, facts.Failed, "%s is below none of %s; name the driver's root with --driver-root", nvmlName, strings.Join(empty, ", "))
		return ""
	}
	specs, script, chosen, most := "", "", 0, -1
	passed := make([]string, len(places))
	for i, p := range places {
		if !isDevice(filepath.Join(devRoot(s.options, p.root), "dev/nvidiactl")) {
			passed[i] = p.root + ": no device node nvidiactl"
			continue
		}
		result := s.inventory(ctx, p.root, "cdi")
		if result.err != nil || !strings.HasPrefix(result.stdout, "{") {
			passed[i] = p.root + ": " + result.summary()
			continue
		}
		mounts := strings.Count(result.stdout, `"containerPath"`)
		passed[i] = fmt.Sprintf("%s: the CDI specs from there have %d mounts", p.root, mounts)
		found := scriptIn(result.stdout)
		if found != "" {
			passed[i] += ", one of them the script " + found
			mounts = 0
		}
		if mounts > most {
			specs, chosen, most, script = result.stdout, i, mounts, found
		}
	}
	if specs != "" {
		passed = slices.Delete(passed, chosen, chosen+1)
	}
	p := places[chosen]
	dev := devRoot(s.options, p.root)
	s.report.Driver = &facts.Driver{Root: p.root, Library: p.nvml, DevRoot: dev, Passed: passed}
	s.report.Machine.DeviceNodes = deviceNodes(filepath.Join(dev, "dev"))
	s.report.Machine.NumberLinks = numberLinks("/dev") // runc looks there, wherever the nodes are
	if specs == "" {
		s.add(name, facts.Failed, "the plugin cannot serve GPUs from any driver root that has %s: %s", nvmlName, strings.Join(passed, "; "))
		if !slices.Contains(s.report.Machine.DeviceNodes, "nvidiactl") {
			// Without a driver in the report, checkAll runs no program that loads the NVML library. The
			// library might try to create the missing device nodes.
			s.report.Driver = nil
		}
		return ""
	}
	if script != "" {
		s.add(name, facts.Differed, "root %s, but containers get the script %s from there instead of the program: "+
			"name the root that has the program with --driver-root", p.root, script)
		return specs
	}
	s.add(name, facts.Agreed, "root %s, %s, device nodes in %s", p.root, p.nvml, filepath.Join(dev, "dev"))
	return specs
}

// checkNVML compares NVML's answers about each GPU with the file that describes the GPU's model,
// and adds the result to the report.
func (s *visit) checkNVML(ctx context.Context) {
	const name = "NVML says what the model's file says"
	file := filepath.Join(s.work, "nvml.json")
	result := s.programs.run(ctx, conformance, "-lib", s.report.Driver.Library, "-models", s.models, "-facts", file, "-test.v")
	s.show("The conformance suite", "", result.stdout+result.stderr)
	said := &facts.NVML{}
	if data, err := os.ReadFile(file); err != nil || json.Unmarshal(data, said) != nil {
		s.add(name, facts.Failed, "the conformance suite wrote no facts: %s", lastLines(result.summary(), 3))
		return
	}
	s.report.NVML = said
	var differs []string
	for i, g := range said.GPUs {
		switch {
		case g.Model == "":
			differs = append(differs, fmt.Sprintf("GPU %d: no model file for %s with PCI ID %s", i, g.Name, g.PCIDeviceID))
		case len(g.Differences) > 0:
			differs = append(differs, fmt.Sprintf("GPU %d differs from %s in %d points", i, g.Model, len(g.Differences)))
		}
	}
	switch {
	case len(said.GPUs) == 0:
		s.add(name, facts.Failed, "NVML lists no GPU")
	case len(differs) > 0:
		s.add(name, facts.Differed, "%s", strings.Join(differs, "; "))
	case result.err != nil:
		s.add(name, facts.Failed, "the conformance suite: %s", lastLines(result.summary(), 3))
	default:
		s.add(name, facts.Agreed, "driver %s, %d GPUs, each as its model's file has it, MIG profiles and placements included",
			said.DriverVersion, len(said.GPUs))
	}
}

// offer is a whole GPU that the plugin would publish as a device in a ResourceSlice.
type offer struct{ name, uuid string }

func uuidsOf(offers []offer) []string {
	var uuids []string
	for _, o := range offers {
		uuids = append(uuids, o.uuid)
	}
	return slices.Sorted(slices.Values(uuids))
}

// checkInventory adds to the report whether the GPUs that the plugin would publish are those that
// NVML lists. It returns the whole GPUs among them, or nil if the plugin's output cannot be read.
func (s *visit) checkInventory(ctx context.Context) []offer {
	const name = "the plugin offers what NVML lists"
	root := s.report.Driver.Root
	table := s.inventory(ctx, root, "table")
	s.show("gpu-kubelet-plugin inventory", "", withoutProcesses(table.stdout)+table.stderr)
	if table.err == nil {
		s.checkMissing(table.stdout)
	}
	slicesText := s.inventory(ctx, root, "yaml")
	s.show("gpu-kubelet-plugin inventory -o yaml", "yaml", slicesText.stdout+slicesText.stderr)
	offers, cards, err := readSlices(slicesText.stdout)
	if table.err != nil || slicesText.err != nil || err != nil {
		s.add(name, facts.Failed, "%s", errors.Join(table.err, slicesText.err, err))
		return nil
	}
	if s.report.NVML == nil {
		s.add(name, facts.NotProven, "the plugin offers %d GPUs, but NVML did not answer", len(cards))
		return offers
	}
	var listed []string
	for _, g := range s.report.NVML.GPUs {
		listed = append(listed, g.UUID)
	}
	slices.Sort(listed)
	if !slices.Equal(cards, listed) {
		s.add(name, facts.Differed, "the plugin offers %v, NVML lists %v", cards, listed)
	} else {
		s.add(name, facts.Agreed, "%d GPUs, %d of them whole", len(cards), len(offers))
	}
	return offers
}

// checkMissing adds to the report what containers would lack of the driver, by the inventory's
// table.
func (s *visit) checkMissing(table string) {
	const name = "the plugin leaves nothing out"
	if lines := listBelow(table, "Left out"); len(lines) > 0 {
		s.add(name, facts.Differed, "%s", strings.Join(lines, "; "))
	} else {
		s.add(name, facts.Agreed, "the plugin found every file that it expects, and refused none")
	}
}

// listBelow returns the lines of the inventory's table below a title.
func listBelow(table, title string) []string {
	_, list, found := strings.Cut(table, "\n"+title+":\n")
	if !found {
		return nil
	}
	list, _, _ = strings.Cut(list, "\n\n")
	var lines []string
	for line := range strings.Lines(list) {
		lines = append(lines, strings.TrimSpace(line))
	}
	return lines
}

// withoutProcesses returns the inventory's table without its list of processes, because reports are
// public.
func withoutProcesses(table string) string {
	before, after, found := strings.Cut(table, "\nOpen in other processes:\n")
	if !found {
		return table
	}
	_, after, _ = strings.Cut(after, "\n\n")
	return before + "\n" + after
}

// readSlices reads ResourceSlices in YAML. The first result has their whole GPUs, the second the
// UUIDs of all GPUs that their devices belong to. It does not use the API's types, which would make
// this program three times as large.
func readSlices(documents string) (whole []offer, cards []string, _ error) {
	for document := range strings.SplitSeq(documents, "---\n") {
		if strings.TrimSpace(document) == "" {
			continue
		}
		var slice struct {
			Kind string `json:"kind"`
			Spec struct {
				Devices []struct {
					Name       string `json:"name"`
					Attributes map[string]struct {
						String string `json:"string"`
					} `json:"attributes"`
				} `json:"devices"`
			} `json:"spec"`
		}
		if err := yaml.Unmarshal([]byte(document), &slice); err != nil {
			return nil, nil, fmt.Errorf("read the ResourceSlices: %w", err)
		}
		if slice.Kind != "ResourceSlice" {
			return nil, nil, fmt.Errorf("the inventory holds %q, not ResourceSlices", slice.Kind)
		}
		for _, d := range slice.Spec.Devices {
			cards = append(cards, d.Attributes["parentUUID"].String)
			if d.Attributes["type"].String == "gpu" {
				whole = append(whole, offer{d.Name, d.Attributes["uuid"].String})
			}
		}
	}
	slices.Sort(cards)
	return whole, slices.Compact(cards), nil
}

// checkSpecs adds to the report whether the CDI specs in text are valid, name only files that exist
// on the machine, and contain the given whole GPUs. It returns the specs, or nil if one of these is
// not so.
func (s *visit) checkSpecs(text string, offered []offer) *specSet {
	const name = "the CDI specs can be used"
	s.show("gpu-kubelet-plugin inventory -o cdi", "json", text)
	folder := filepath.Join(s.work, "cdi")
	if err := os.Mkdir(folder, 0o700); err != nil {
		s.add(name, facts.Failed, "%v", err)
		return nil
	}
	set, err := readSpecs(text, folder)
	if err != nil {
		s.add(name, facts.Failed, "%v", err)
		return nil
	}
	wrong := set.missing(s.programs.path(hook))
	for _, o := range offered {
		if _, err := set.gpuDevice(o.name); err != nil {
			wrong = append(wrong, err.Error())
		}
	}
	if len(wrong) > 0 {
		s.add(name, facts.Differed, "%s", strings.Join(wrong, "; "))
		return nil
	}
	e := set.base.ContainerEdits
	s.add(name, facts.Agreed, "%d mounts, %d common device nodes, %d hooks, %d GPUs; all of them exist",
		len(e.Mounts), len(e.DeviceNodes), len(e.Hooks), len(set.claim.Devices))
	return set
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], " / ")
}
