package conformance

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

// ofTheMachine are questions whose answers depend on the machine around the GPU, its settings or
// its history, and not on the GPU's model and the driver.
var ofTheMachine = []string{
	"fabric", "fabric, version 2", "fabric, version 3", "clock event reasons", "virtualization mode",
	"MIG mode", "persistence mode", "compute mode", "ECC mode", "remapped rows", "confidential computing",
	"ready state",
}

// The simulator must answer as the real GPU did.
func TestSimulatorAnswersAsRecordedHardware(t *testing.T) {
	needSimulator(t)
	reports, err := filepath.Glob("../../hardware/*/facts.json")
	if err != nil {
		t.Fatal(err)
	}
	compared := 0
	for _, path := range reports {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var report facts.Report
		if err := json.Unmarshal(data, &report); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if report.Driver == nil || report.Driver.Simulated || report.NVML == nil || report.Getters == nil {
			continue
		}
		for _, gpu := range report.NVML.GPUs {
			if gpu.Model == "" {
				continue // no file describes it
			}
			compared++
			t.Run(filepath.Base(filepath.Dir(path))+"/"+gpu.PCIAddress, func(t *testing.T) { compareRecorded(t, report, gpu) })
		}
	}
	if compared == 0 {
		t.Error("no report of a real GPU was compared")
	}
}

// compareRecorded asks a simulated GPU of the same model and driver version what the recorded one
// was asked.
func compareRecorded(t *testing.T, report facts.Report, gpu facts.GPU) {
	node := readNode(t, "dgx-h100")
	node.GPUs = node.GPUs[:1]
	node.GPUs[0].Model = gpu.Model
	node.DriverVersion = report.NVML.DriverVersion
	newWorld(t, node)
	library := initialize(t)
	has := func(string) bool { return true }
	answers := facts.Answers{}
	AskSystem(library, has, answers)
	device := devices(t, library)[0]
	AskDevice(device, has, answers)
	pci, _ := device.GetPciInfo()
	for question, recorded := range report.Getters.Unprivileged {
		of, asked, _ := strings.Cut(question, ": ")
		switch {
		case slices.Contains(ofTheMachine, asked) || recorded.Error == facts.NoFunction:
			continue
		case of == gpu.PCIAddress:
			question = text(pci.BusId[:]) + ": " + asked
		case of != "machine":
			continue
		}
		if got := answers[question]; got != recorded {
			t.Errorf("%s: the simulator says %q, the hardware %q", asked, got, recorded)
		}
	}
}
