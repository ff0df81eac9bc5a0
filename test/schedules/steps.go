package schedules

import (
	"path/filepath"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// step is a kind of call of the plugin to the disk, the CDI directory, the hardware, the MPS
// supervisor or the API server, such as "record: rename". Its value is the row's name in the
// coverage table.
type step string

// class is a group of steps that the same faults can interrupt.
type class int

const (
	reading  class = iota // reads a file
	listing               // lists a directory
	creating              // creates a file and syncs its content
	naming                // creates or removes a directory entry, or renames a file
	syncing               // syncs a directory
	specifying
	unspecifying
	specListing
	looking  // queries a GPU
	changing // changes a GPU
	daemons  // starts or stops an MPS daemon
	listingMPS
	asking  // reads from the API server
	pausing // has no effect, but lets other calls run
)

const (
	baseWrite   step = "base spec: write"
	specWrite   step = "claim spec: write"
	specRemove  step = "claim spec: remove"
	specList    step = "claim specs: list"
	look        step = "GPU: query"
	modeOn      step = "GPU: MIG mode on"
	modeOff     step = "GPU: MIG mode off"
	createGI    step = "GPU: create GPU instance"
	createCI    step = "GPU: create compute instance"
	destroyCI   step = "GPU: destroy compute instance"
	destroyGI   step = "GPU: destroy GPU instance"
	computeMode step = "GPU: set compute mode"
	readSlice   step = "GPU: read time slice"
	setSlice    step = "GPU: set time slice"
	startDaemon step = "MPS: start daemon"
	stopDaemon  step = "MPS: stop daemon"
	listDaemons step = "MPS: list daemons"
	readClaim   step = "API server: read claim"
	foundGone   step = "claim: found orphaned"
)

// classes lists all steps with their classes, in the order of the coverage table.
var classes = []struct {
	step  step
	class class
}{
	{"state: make directory", naming}, {"state: sync", syncing},
	{"record: list", listing}, {"record: read", reading}, {"record: create", creating}, {"record: rename", naming}, {"record: sync", syncing},
	{"record: remove", naming}, {"record: remove unfinished", naming}, {"record: set aside", naming},
	{"holder: list", listing}, {"holder: read", reading}, {"holder: create", creating}, {"holder: rename", naming}, {"holder: sync", syncing},
	{"holder: remove", naming}, {"holder: remove unfinished", naming}, {"holder: set aside", naming},
	{"mark: read", reading}, {"mark: create", creating}, {"mark: rename", naming}, {"mark: sync", syncing},
	{"mark: remove", naming}, {"mark: remove unfinished", naming},
	{"quarantine: sync", syncing},
	{baseWrite, specifying}, {specWrite, specifying}, {specRemove, unspecifying}, {specList, specListing},
	{look, looking}, {modeOn, changing}, {modeOff, changing},
	{createGI, changing}, {createCI, changing}, {destroyCI, changing}, {destroyGI, changing},
	{computeMode, changing}, {readSlice, looking}, {setSlice, changing},
	{startDaemon, daemons}, {stopDaemon, daemons}, {listDaemons, listingMPS},
	{readClaim, asking}, {foundGone, pausing},
}

func (s step) class() (class, bool) {
	for _, c := range classes {
		if c.step == s {
			return c.class, true
		}
	}
	return 0, false
}

// stateDirs maps each directory of the plugin's state to the first word of its steps' names.
var stateDirs = map[string]string{"claims": "record", "holders": "holder", "mig": "mark", "quarantine": "quarantine"}

func stateDirOf(dir string) string {
	if stateDir, ok := stateDirs[filepath.Base(dir)]; ok {
		return stateDir
	}
	return "state"
}

// onFile returns the step for an operation on the file at path. The parameter what is the
// operation, such as "read".
func onFile(what, path string) step {
	stateDir := stateDirOf(filepath.Dir(path))
	if _, unfinished := durable.Unfinished(filepath.Base(path)); unfinished && what == "remove" {
		what = "remove unfinished"
	}
	return step(stateDir + ": " + what)
}

func onRename(from, to string) step {
	if stateDirOf(filepath.Dir(to)) == "quarantine" {
		return step(stateDirOf(filepath.Dir(from)) + ": set aside")
	}
	return onFile("rename", to)
}

func onDir(what, dir string) step { return step(stateDirOf(dir) + ": " + what) }

// fault is something that can go wrong at a fault point. Its value is the fault's name in the
// coverage table.
type fault string

const (
	none            fault = ""
	killBefore      fault = "kill before"
	killWithin      fault = "kill within"
	killAfter       fault = "kill after"
	cutBefore       fault = "power cut before"
	cutWithin       fault = "power cut within"
	cutAfter        fault = "power cut after"
	fails           fault = "error"
	unreadable      fault = "unreadable"
	full            fault = "disk full"
	readOnly        fault = "read-only disk"
	slow            fault = "slow"
	hangs           fault = "no answer"
	lostAnswer      fault = "lost answer"
	inUse           fault = "in use"
	givenUp         fault = "kubelet gives up"
	secondInstance  fault = "second instance starts"
	gpuReset        fault = "GPU reset"
	gpuLost         fault = "GPU lost"
	reload          fault = "driver reload"
	clockJump       fault = "clock jump"
	supervisorDeath fault = "supervisor dies"
)

var (
	calls = []class{
		reading, listing, creating, naming, syncing, specifying, unspecifying, specListing,
		looking, changing, daemons, listingMPS, asking,
	}
	anywhere = append(slices.Clone(calls), pausing)
	effects  = []class{creating, naming, syncing, specifying, unspecifying, changing, daemons}
	partly   = []class{creating, specifying}
	onDisk   = []class{creating, naming, syncing, specifying, unspecifying}
	answers  = []class{looking, changing, daemons, listingMPS, asking}
)

// faults lists all faults, and the classes of steps that each of them can interrupt.
var faults = []struct {
	fault fault
	at    []class
}{
	{killBefore, anywhere}, {killWithin, partly}, {killAfter, effects},
	{cutBefore, anywhere}, {cutWithin, partly}, {cutAfter, effects},
	{fails, calls}, {unreadable, []class{reading}}, {full, []class{creating, specifying}}, {readOnly, onDisk}, {slow, anywhere},
	{hangs, answers}, {lostAnswer, []class{changing, daemons}}, {inUse, []class{changing}},
	{givenUp, anywhere}, {secondInstance, anywhere}, {gpuReset, anywhere}, {gpuLost, anywhere},
	{reload, anywhere}, {clockJump, anywhere}, {supervisorDeath, anywhere},
}

// possible lists the faults that can interrupt the step. It leaves out unreadable files for the
// step "mark: read", because those files are empty.
func (s step) possible() []fault {
	c, known := s.class()
	var all []fault
	for _, f := range faults {
		if known && slices.Contains(f.at, c) && (f.fault != unreadable || s != "mark: read") {
			all = append(all, f.fault)
		}
	}
	return all
}

// odds are the fault probabilities, in percent, of steps that happen more rarely or more often than
// most.
var odds = map[step]float64{
	"record: remove unfinished": 20, "record: set aside": 60, "holder: set aside": 60,
	"holder: remove unfinished": 60, "quarantine: sync": 60,
	"mark: remove": 60, "mark: remove unfinished": 60, "mark: sync": 20, "mark: rename": 20, "mark: create": 20,
	modeOff: 60, modeOn: 15, readClaim: 30, foundGone: 30, stopDaemon: 40, startDaemon: 15,
	readSlice: 20, setSlice: 25, computeMode: 25, createGI: 15, createCI: 15, destroyCI: 25, destroyGI: 30,
	"record: remove": 8, "holder: remove": 12, "holder: rename": 4, "holder: create": 4, "holder: sync": 4,
	"state: make directory": 0.7, "state: sync": 0.7, "record: list": 1,
}
