package schedules

import (
	"path/filepath"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// faultPoint is a kind of call of the plugin to the disk, the CDI directory, the hardware, the MPS
// supervisor or the API server, such as "record: rename". Its value is the row's name in the
// coverage table.
type faultPoint string

// class is a group of fault points that the same faults can interrupt.
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
	querying // queries a GPU
	changing // changes a GPU
	daemons  // starts or stops an MPS daemon
	listingMPS
	binding // writes to the PCI bus
	asking  // reads from the API server
	pausing // has no effect, but lets other calls run
)

const (
	baseWrite     faultPoint = "base spec: write"
	specWrite     faultPoint = "claim spec: write"
	specRemove    faultPoint = "claim spec: remove"
	metadataWrite faultPoint = "claim metadata: write"
	specList      faultPoint = "claim specs: list"
	queryGPU      faultPoint = "GPU: query"
	modeOn        faultPoint = "GPU: MIG mode on"
	modeOff       faultPoint = "GPU: MIG mode off"
	createGI      faultPoint = "GPU: create GPU instance"
	createCI      faultPoint = "GPU: create compute instance"
	destroyCI     faultPoint = "GPU: destroy compute instance"
	destroyGI     faultPoint = "GPU: destroy GPU instance"
	computeMode   faultPoint = "GPU: set compute mode"
	readSlice     faultPoint = "GPU: read time slice"
	setSlice      faultPoint = "GPU: set time slice"
	startDaemon   faultPoint = "MPS: start daemon"
	stopDaemon    faultPoint = "MPS: stop daemon"
	listDaemons   faultPoint = "MPS: list daemons"
	setOverride   faultPoint = "PCI: set driver override"
	unbindDriver  faultPoint = "PCI: unbind driver"
	probeDrivers  faultPoint = "PCI: probe drivers"
	readClaim     faultPoint = "API server: read claim"
	foundGone     faultPoint = "claim: found orphaned"
)

// classes lists all fault points with their classes, in the order of the coverage table.
var classes = []struct {
	point faultPoint
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
	{baseWrite, specifying}, {specWrite, specifying}, {metadataWrite, specifying}, {specRemove, unspecifying}, {specList, specListing},
	{queryGPU, querying}, {modeOn, changing}, {modeOff, changing},
	{createGI, changing}, {createCI, changing}, {destroyCI, changing}, {destroyGI, changing},
	{computeMode, changing}, {readSlice, querying}, {setSlice, changing},
	{startDaemon, daemons}, {stopDaemon, daemons}, {listDaemons, listingMPS},
	{setOverride, binding}, {unbindDriver, binding}, {probeDrivers, binding},
	{readClaim, asking}, {foundGone, pausing},
}

func (p faultPoint) class() (class, bool) {
	for _, c := range classes {
		if c.point == p {
			return c.class, true
		}
	}
	return 0, false
}

// stateDirs maps each directory of the plugin's state to the first word of its fault points' names.
var stateDirs = map[string]string{"claims": "record", "holders": "holder", "mig": "mark", "quarantine": "quarantine"}

func stateDirOf(dir string) string {
	if stateDir, ok := stateDirs[filepath.Base(dir)]; ok {
		return stateDir
	}
	return "state"
}

// onFile returns the fault point of an operation on the file at path. The parameter what is the
// operation, such as "read".
func onFile(what, path string) faultPoint {
	stateDir := stateDirOf(filepath.Dir(path))
	if _, unfinished := durable.Unfinished(filepath.Base(path)); unfinished && what == "remove" {
		what = "remove unfinished"
	}
	return faultPoint(stateDir + ": " + what)
}

func onRename(from, to string) faultPoint {
	if stateDirOf(filepath.Dir(to)) == "quarantine" {
		return faultPoint(stateDirOf(filepath.Dir(from)) + ": set aside")
	}
	return onFile("rename", to)
}

func onDir(what, dir string) faultPoint { return faultPoint(stateDirOf(dir) + ": " + what) }

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
	noEffect        fault = "no effect"
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
		querying, changing, daemons, listingMPS, binding, asking,
	}
	anywhere = append(slices.Clone(calls), pausing)
	effects  = []class{creating, naming, syncing, specifying, unspecifying, changing, daemons, binding}
	partly   = []class{creating, specifying}
	onDisk   = []class{creating, naming, syncing, specifying, unspecifying}
	answers  = []class{querying, changing, daemons, listingMPS, asking}
)

// faults lists all faults, and the classes of fault points that each of them can interrupt.
var faults = []struct {
	fault fault
	at    []class
}{
	{killBefore, anywhere}, {killWithin, partly}, {killAfter, effects},
	{cutBefore, anywhere}, {cutWithin, partly}, {cutAfter, effects},
	{fails, calls}, {unreadable, []class{reading}}, {full, []class{creating, specifying}}, {readOnly, onDisk}, {slow, anywhere},
	{hangs, answers}, {lostAnswer, []class{changing, daemons, binding}}, {noEffect, []class{binding}}, {inUse, []class{changing}},
	{givenUp, anywhere}, {secondInstance, anywhere}, {gpuReset, anywhere}, {gpuLost, anywhere},
	{reload, anywhere}, {clockJump, anywhere}, {supervisorDeath, anywhere},
}

// possible lists the faults that a schedule can inject at the fault point. It leaves out unreadable
// files for "mark: read", because those files are empty.
func (p faultPoint) possible() []fault {
	c, known := p.class()
	var all []fault
	for _, f := range faults {
		if known && slices.Contains(f.at, c) && (f.fault != unreadable || p != "mark: read") {
			all = append(all, f.fault)
		}
	}
	return all
}

// odds are the fault probabilities, in percent, of fault points that the plugin reaches more rarely
// or more often than most.
var odds = map[faultPoint]float64{
	"record: remove unfinished": 20, "record: set aside": 60, "holder: set aside": 60,
	"holder: remove unfinished": 60, "quarantine: sync": 60,
	"mark: remove": 60, "mark: remove unfinished": 60, "mark: sync": 20, "mark: rename": 20, "mark: create": 20,
	modeOff: 60, modeOn: 15, readClaim: 30, foundGone: 30, stopDaemon: 40, startDaemon: 15,
	setOverride: 8, unbindDriver: 8, probeDrivers: 8,
	readSlice: 20, setSlice: 25, computeMode: 25, createGI: 15, createCI: 15, destroyCI: 25, destroyGI: 30,
	"record: remove": 8, "holder: remove": 12, "holder: rename": 4, "holder: create": 4, "holder: sync": 4,
	"state: make directory": 0.7, "state: sync": 0.7, "record: list": 1,
}
