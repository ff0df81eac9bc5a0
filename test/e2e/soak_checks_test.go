package e2e

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// use is a device in a container for a while, in seconds since the machine's start.
type use struct {
	pod, gpu     string
	profile, mig string // of the MIG device, if it is one
	share        bool
	from, to     float64
}

// excludes says whether the two cannot be at once.
func (a use) excludes(b use) bool {
	sameDevice := a.gpu == b.gpu && (a.mig == "" || b.mig == "" || a.mig == b.mig)
	bothShares := a.share && b.share && a.mig == b.mig
	return sameDevice && !bothShares
}

// check makes sure that a Pod has ended well, and that its container had what its claim was given.
func (s *soak) check(l life) {
	s.t.Helper()
	if l.err != nil {
		name := ""
		if l.pod != nil {
			name = l.pod.Name
		}
		s.t.Errorf("%v: %+v\n%s", l.err, l.pod, s.events(s.t, s.namespace, name))
		return
	}
	var ended *corev1.ContainerStateTerminated
	if status := l.pod.Status.ContainerStatuses; len(status) == 1 {
		ended = status[0].State.Terminated
		if before := status[0].LastTerminationState.Terminated; before != nil && !strings.Contains(before.Message, "context canceled") {
			s.t.Errorf("Pod %s: its container did not start at first: %+v", l.pod.Name, before)
		}
	}
	if ended == nil || ended.ExitCode != 0 {
		s.t.Errorf("Pod %s: %+v\n%s", l.pod.Name, l.pod.Status, s.events(s.t, s.namespace, l.pod.Name))
		return
	}
	uses, err := s.seen(l, ended.Message)
	if err != nil {
		s.t.Errorf("Pod %s: %v; its container said\n%s", l.pod.Name, err, ended.Message)
		return
	}
	s.uses = append(s.uses, uses...)
	s.done[l.kind.name]++
	for _, c := range l.pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			s.starts[l.kind.name] = append(s.starts[l.kind.name], ended.StartedAt.Sub(c.LastTransitionTime.Time))
		}
	}
}

var (
	fromForm = regexp.MustCompile(`(?m)^from (\S+)$`)
	toForm   = regexp.MustCompile(`(?m)^to (\S+)$`)
	// listForm is a line of nvidia-smi -L: a GPU, or below it a MIG device.
	listForm = regexp.MustCompile(`(?m)^(?:GPU|\s+MIG (\S+)\s+Device)\s+\d+:.*\(UUID: (\S+)\)$`)
)

// seen compares what a container saw with what its claim was given.
func (s *soak) seen(l life, said string) ([]use, error) {
	from, errFrom := only(fromForm, said)
	to, errTo := only(toForm, said)
	uses, errList := listed(said)
	want, share, errGiven := s.given(l.claim)
	if err := errors.Join(errFrom, errTo, errList, errGiven); err != nil {
		return nil, err
	}
	told := toldUUIDs(l.claim)
	var have []string
	for i := range uses {
		u := &uses[i]
		u.pod, u.share, u.from, u.to = l.pod.Name, share, from, to
		have = append(have, u.gpu+" "+u.profile)
		if u.mig != "" && len(told) > 0 && !slices.Contains(told, u.mig) {
			return nil, fmt.Errorf("the claim's status says %v", told)
		}
	}
	slices.Sort(have)
	if len(want) == 0 || !slices.Equal(want, have) {
		return nil, fmt.Errorf("it was allocated %q and saw %q", want, have)
	}
	if isClient := strings.Contains(said, `"mode":"mps"`); isClient != l.kind.client {
		return nil, fmt.Errorf("a program in it was a client of MPS: %t", isClient)
	}
	return uses, nil
}

// listed are the devices that nvidia-smi has listed, twice the same ones.
func listed(said string) ([]use, error) {
	var all []use
	for _, m := range listForm.FindAllStringSubmatch(said, -1) {
		profile, uuid := m[1], m[2]
		if profile == "" {
			all = append(all, use{gpu: uuid})
			continue
		}
		if len(all) == 0 {
			return nil, errors.New("a MIG device without a GPU")
		}
		if all[len(all)-1].mig != "" { // another one of the same GPU
			all = append(all, use{gpu: all[len(all)-1].gpu})
		}
		last := &all[len(all)-1]
		last.profile, last.mig = profile, uuid
	}
	once := all[:len(all)/2]
	if !slices.Equal(once, all[len(all)/2:]) {
		return nil, errors.New("the container saw one thing at first and another in the end")
	}
	return once, nil
}

// given are the devices that a claim was allocated, sorted, each as its GPU and its profile.
func (s *soak) given(claim *resourceapi.ResourceClaim) (devices []string, share bool, err error) {
	for _, r := range claim.Status.Allocation.Devices.Results {
		d, ok := s.known[r.Device]
		if !ok {
			return nil, false, fmt.Errorf("it was allocated %s, which was not offered when all began", r.Device)
		}
		devices = append(devices, *d.Attributes["parentUUID"].StringValue+" "+ptr.Deref(d.Attributes["profile"].StringValue, ""))
		share = strings.HasSuffix(*d.Attributes["type"].StringValue, "-share")
	}
	slices.Sort(devices)
	return devices, share, nil
}

var migUUIDForm = regexp.MustCompile(`"uuid":"(MIG-[0-9a-f-]+)"`)

// toldUUIDs are the MIG devices that the claim's status names. The plugin may have been killed before it said so.
func toldUUIDs(claim *resourceapi.ResourceClaim) []string {
	var uuids []string
	for _, d := range claim.Status.Devices {
		if d.Data != nil {
			if m := migUUIDForm.FindSubmatch(d.Data.Raw); m != nil {
				uuids = append(uuids, string(m[1]))
			}
		}
	}
	return uuids
}

func only(form *regexp.Regexp, text string) (float64, error) {
	m := form.FindAllStringSubmatch(text, -1)
	if len(m) != 1 {
		return 0, fmt.Errorf("%d times %s", len(m), form)
	}
	return strconv.ParseFloat(m[0][1], 64)
}

// neverTwice makes sure that no device was in two containers at the same time, unless both had a share of it.
func (s *soak) neverTwice() {
	s.t.Helper()
	byStart := slices.SortedFunc(slices.Values(s.uses), func(a, b use) int { return int(1000 * (a.from - b.from)) })
	for i, a := range byStart {
		for _, b := range byStart[i+1:] {
			if b.from >= a.to {
				break
			}
			if a.pod != b.pod && a.excludes(b) {
				s.t.Errorf("Pods %s and %s had the same device at the same time: %+v and %+v", a.pod, b.pod, a, b)
			}
		}
	}
}
