package conformance

import (
	"flag"
	"maps"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

var gettersFlag = flag.String("getters", "",
	"file to write the answers of a closed list of getters to, as JSON; goes with -lib, and nothing else runs")

// On real hardware, this test calls the getters and writes their answers to a file. It may run with
// CAP_SYS_ADMIN, so it uses NVML only through the two interfaces with getters.
func TestHardwareGettersAreRecorded(t *testing.T) {
	if *gettersFlag == "" {
		t.Skip("no -getters given")
	}
	library := initialize(t)
	has := func(function string) bool { return library.Extensions().LookupSymbol(function) == nil }
	answers := facts.Answers{}
	AskSystem(library, has, answers)
	for _, device := range devices(t, library) {
		AskDevice(device, has, answers)
	}
	if err := facts.Write(*gettersFlag, answers); err != nil {
		t.Fatal(err)
	}
}

// The interfaces that reach hardware with CAP_SYS_ADMIN must have exactly these functions. Who adds
// one here must know that it changes nothing.
func TestListOfGettersIsClosed(t *testing.T) {
	for _, x := range []struct {
		list reflect.Type
		want []string
	}{
		{reflect.TypeFor[DeviceGetters](), []string{
			"GetComputeMode", "GetCurrentClocksEventReasons", "GetEccMode", "GetFieldValues", "GetGpuFabricInfo", "GetGpuFabricInfoV",
			"GetGpuInstanceById", "GetGpuInstancePossiblePlacements", "GetGpuInstanceProfileInfo", "GetGpuInstanceProfileInfoV",
			"GetGpuInstances", "GetMaxMigDeviceCount", "GetMemoryInfo", "GetMigDeviceHandleByIndex", "GetMigMode", "GetPciInfo",
			"GetPersistenceMode", "GetRemappedRows", "GetRepairStatus", "GetRetiredPagesPendingStatus", "GetSramEccErrorStatus",
			"GetSupportedClocksEventReasons", "GetSupportedEventTypes", "GetTotalEccErrors", "GetTotalEnergyConsumption",
			"GetUnrepairableMemoryFlag_v1", "GetVirtualizationMode",
		}},
		{reflect.TypeFor[SystemGetters](), []string{
			"DeviceGetHandleByPciBusId", "SystemGetConfComputeGpusReadyState", "SystemGetConfComputeState",
		}},
	} {
		var got []string
		for i := range x.list.NumMethod() {
			got = append(got, x.list.Method(i).Name)
		}
		slices.Sort(got)
		if !slices.Equal(got, x.want) {
			t.Errorf("%s has %v, want %v", x.list, got, x.want)
		}
	}
}

// The simulated library must answer every getter for a GPU with MIG and for one without.
func TestGettersAreAnswered(t *testing.T) {
	for node, want := range map[string]map[string]facts.Answer{
		"dgx-h100": {"profile 0": {Value: "ID 19, 1 slices, 9984 MiB, at most 7"}, "field 184 (MIG mode changes without a reset)": {Value: "1"},
			"fabric, version 3": {Value: "state 3, status 0, health mask 0x0, summary 0"}, "field 144 (row remap pending)": {Value: "0"},
		},
		"t4-x1": {"profile 0": {Error: facts.NotSupported}, "MIG mode": {Error: facts.NotSupported}},
	} {
		t.Run(node, func(t *testing.T) {
			newWorld(t, readNode(t, node))
			library := initialize(t)
			device := devices(t, library)[0]
			pci, _ := device.GetPciInfo()
			answers := facts.Answers{}
			has := func(string) bool { return true }
			AskSystem(library, has, answers)
			AskDevice(device, has, answers)
			for question, answer := range want {
				if got := answers[text(pci.BusId[:])+": "+question]; got != answer {
					t.Errorf("%s: %+v, want %+v", question, got, answer)
				}
			}
			for question, answer := range answers {
				if answer.Refused() {
					t.Errorf("%s: %s", question, answer.Error)
				}
			}
		})
	}
}

// A function that hangs must not keep the others from their answers.
func TestHangingGetterCostsOnlyItsAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers, hang := facts.Answers{}, make(chan struct{})
		has := func(string) bool { return true }
		record(answers, "hangs", "f", has, func() (string, nvml.Return) { <-hang; return "", nvml.SUCCESS })
		record(answers, "fails", "f", has, func() (string, nvml.Return) { return "7", nvml.ERROR_IN_USE })
		record(answers, "answers", "f", has, func() (string, nvml.Return) { return "1", nvml.SUCCESS })
		close(hang)
		want := facts.Answers{
			"hangs": {Error: "no answer within 10s"}, "fails": {Error: nvml.ERROR_IN_USE.Error() + " (19)"}, "answers": {Value: "1"},
		}
		if !maps.Equal(answers, want) {
			t.Errorf("%v, want %v", answers, want)
		}
	})
}

// A function that an older driver's library lacks must not be called.
func TestMissingFunctionIsRecorded(t *testing.T) {
	answers := facts.Answers{}
	AskSystem(nil, func(string) bool { return false }, answers)
	if got := answers["machine: ready state"]; len(answers) != 3 || got.Error != facts.NoFunction {
		t.Errorf("answers: %v", answers)
	}
}
