package schedules

import (
	"path/filepath"
	"slices"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// step is what a call does to the world, as the table of what was met names it.
type step string

// class sorts steps by what can go wrong with them.
type class int

const (
	reading  class = iota // a file's content
	listing               // a directory
	creating              // a file's content, and the wait until it is on the disk
	naming                // a name that comes, goes or is changed
	syncing               // the wait until names are on the disk
	specifying
	unspecifying
	specListing
	looking  // the hardware is asked
	changing // the hardware is changed
	daemons  // a daemon is started or ended
	listingMPS
	asking   // the API server is asked
	thinking // nothing is done, and others may do what they like
)

const (
	baseWrite   step = "base spec: write"
	specWrite   step = "claim spec: write"
	specRemove  step = "claim spec: remove"
	specList    step = "claim specs: list"
	look        step = "GPU: look"
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
	foundGone   step = "claim: found gone"
)

// classes are those of the steps, in the table's order.
var classes = []struct {
	step  step
	class class
}{
	{"state: make directory", naming}, {"state: sync", syncing},
	{"record: list", listing}, {"record: read", reading}, {"record: create", creating}, {"record: rename", naming}, {"record: sync", syncing},
	{"record: remove", naming}, {"record: remove unfinished", naming}, {"record: set aside", naming},
	{"holder: list", listing}, {"holder: read", reading}, {"holder: create", creating}, {"holder: rename", naming}, {"holder: sync", syncing},
	{"holder: remove", naming}, {"holder: remove unfinished", naming}, {"holder: set aside", naming},
	{"mark: read", reading}, {"mark: create", creating}, {"mark: rename", naming}, {"mark: sync", syncing}, {"mark: remove", naming}, {"mark: remove unfinished", naming},
	{"quarantine: sync", syncing},
	{baseWrite, specifying}, {specWrite, specifying}, {specRemove, unspecifying}, {specList, specListing},
	{look, looking}, {modeOn, changing}, {modeOff, changing}, {createGI, changing}, {createCI, changing}, {destroyCI, changing}, {destroyGI, changing},
	{computeMode, changing}, {readSlice, looking}, {setSlice, changing},
	{startDaemon, daemons}, {stopDaemon, daemons}, {listDaemons, listingMPS},
	{readClaim, asking}, {foundGone, thinking},
}

func (s step) class() (class, bool) {
	for _, c := range classes {
		if c.step == s {
			return c.class, true
		}
	}
	return 0, false
}

// rooms are the directories of the plugin's state.
var rooms = map[string]string{"claims": "record", "holders": "holder", "mig": "mark", "quarantine": "quarantine"}

func roomOf(dir string) string {
	if room, ok := rooms[filepath.Base(dir)]; ok {
		return room
	}
	return "state"
}

// onFile is the step that a change of a file is.
func onFile(what, path string) step {
	room := roomOf(filepath.Dir(path))
	if _, unfinished := durable.Unfinished(filepath.Base(path)); unfinished && what == "remove" {
		what = "remove unfinished"
	}
	return step(room + ": " + what)
}

func onRename(from, to string) step {
	if roomOf(filepath.Dir(to)) == "quarantine" {
		return step(roomOf(filepath.Dir(from)) + ": set aside")
	}
	return onFile("rename", to)
}

func onDir(what, dir string) step { return step(roomOf(dir) + ": " + what) }

// fault is what goes wrong at a point.
type fault string

const (
	none       fault = ""
	killBefore fault = "kill before"
	killWithin fault = "kill within"
	killAfter  fault = "kill after"
	cutBefore  fault = "power cut before"
	cutWithin  fault = "power cut within"
	cutAfter   fault = "power cut after"
	fails      fault = "error"
	bad        fault = "unreadable"
	full       fault = "disk full"
	readOnly   fault = "read-only disk"
	slow       fault = "slow"
	hangs      fault = "no answer"
	lostAnswer fault = "lost answer"
	inUse      fault = "in use"
	givenUp    fault = "kubelet gives up"
	twin       fault = "second instance starts"
	gpuReset   fault = "GPU reset"
	gpuLost    fault = "GPU lost"
	reload     fault = "driver reload"
	clockJump  fault = "clock jump"
	unserved   fault = "supervisor dies"
)

var (
	calls    = []class{reading, listing, creating, naming, syncing, specifying, unspecifying, specListing, looking, changing, daemons, listingMPS, asking}
	anywhere = append(slices.Clone(calls), thinking)
	effects  = []class{creating, naming, syncing, specifying, unspecifying, changing, daemons}
	partly   = []class{creating, specifying}
	onDisk   = []class{creating, naming, syncing, specifying, unspecifying}
	answers  = []class{looking, changing, daemons, listingMPS, asking}
)

// faults are all that can go wrong, with where they can.
var faults = []struct {
	fault fault
	at    []class
}{
	{killBefore, anywhere}, {killWithin, partly}, {killAfter, effects},
	{cutBefore, anywhere}, {cutWithin, partly}, {cutAfter, effects},
	{fails, calls}, {bad, []class{reading}}, {full, []class{creating, specifying}}, {readOnly, onDisk}, {slow, anywhere},
	{hangs, answers}, {lostAnswer, []class{changing, daemons}}, {inUse, []class{changing}},
	{givenUp, anywhere}, {twin, anywhere}, {gpuReset, anywhere}, {gpuLost, anywhere}, {reload, anywhere}, {clockJump, anywhere}, {unserved, anywhere},
}

// can lists what can go wrong with a step. A mark has no content that could be unreadable.
func (s step) can() []fault {
	c, known := s.class()
	var all []fault
	for _, f := range faults {
		if known && slices.Contains(f.at, c) && (f.fault != bad || s != "mark: read") {
			all = append(all, f.fault)
		}
	}
	return all
}

// odds are how often, in percent, something goes wrong with steps that come more seldom or more often than others.
var odds = map[step]float64{
	"record: remove unfinished": 20, "record: set aside": 60, "holder: set aside": 60, "holder: remove unfinished": 60, "quarantine: sync": 60,
	"mark: remove": 60, "mark: remove unfinished": 60, "mark: sync": 20, "mark: rename": 20, "mark: create": 20, modeOff: 60, modeOn: 15, readClaim: 30, foundGone: 30,
	stopDaemon: 40, startDaemon: 15, readSlice: 20, setSlice: 25, computeMode: 25, createGI: 15, createCI: 15, destroyCI: 25, destroyGI: 30,
	"record: remove": 8, "holder: remove": 12, "holder: rename": 4, "holder: create": 4, "holder: sync": 4,
	"state: make directory": 0.7, "state: sync": 0.7, "record: list": 1,
}
