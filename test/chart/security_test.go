package chart

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
)

const securityPage = "../../docs/security.md"

// table returns the rows of the table below this heading of docs/security.md, as "first cell:
// second cell". A second cell with several things, separated by semicolons, gives several rows.
func table(t *testing.T, heading string) []string {
	t.Helper()
	page, err := os.ReadFile(securityPage)
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(page), "\n"+heading+"\n")
	if !found {
		t.Fatalf("%s has no heading %q", securityPage, heading)
	}
	section, _, _ = strings.Cut(section, "\n## ")
	var rows []string
	for line := range strings.Lines(section) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) < 3 || !strings.Contains(cells[0], "`") {
			continue
		}
		if strings.TrimSpace(cells[2]) == "" {
			t.Errorf("no reason: %s", line)
		}
		for what := range strings.SplitSeq(cells[1], ";") {
			rows = append(rows, strings.Trim(strings.TrimSpace(cells[0]), "`")+": "+strings.ReplaceAll(strings.TrimSpace(what), "`", ""))
		}
	}
	slices.Sort(rows)
	return rows
}

// workloads returns the chart's Pods by the names that docs/security.md gives them.
func workloads(objects []runtime.Object) map[string]corev1.PodSpec {
	pods := map[string]corev1.PodSpec{}
	for _, object := range objects {
		switch o := object.(type) {
		case *appsv1.DaemonSet:
			pods[map[string]string{plugin: "plugin", supervisor: "supervisor"}[o.Name]] = o.Spec.Template.Spec
		case *batchv1.Job:
			pods["uninstall"] = o.Spec.Template.Spec
		}
	}
	return pods
}

// powers returns the privileges of a Pod that most Pods do not have, in the words of
// docs/security.md.
func powers(pod corev1.PodSpec) []string {
	var has []string
	add := func(is bool, format string, args ...any) {
		if is {
			has = append(has, fmt.Sprintf(format, args...))
		}
	}
	add(pod.HostPID, "host PID namespace")
	add(pod.HostNetwork, "host network")
	add(pod.HostIPC, "host IPC namespace")
	add(ptr.Deref(pod.AutomountServiceAccountToken, true), "token that lives for a year")
	for _, token := range tokens(pod) {
		add(true, "token for %d s", ptr.Deref(token.ExpirationSeconds, 3600))
	}
	podLevel := ptr.Deref(pod.SecurityContext, corev1.PodSecurityContext{})
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		own := ptr.Deref(c.SecurityContext, corev1.SecurityContext{})
		privileged := ptr.Deref(own.Privileged, false)
		user := own.RunAsUser
		if user == nil {
			user = podLevel.RunAsUser
		}
		add(privileged, "privileged")
		add(ptr.Deref(user, 0) == 0, "user 0")
		add(!ptr.Deref(own.ReadOnlyRootFilesystem, false), "writable root file system")
		add(!privileged && ptr.Deref(own.AllowPrivilegeEscalation, true), "gain of privileges")
		seccomp := own.SeccompProfile
		if seccomp == nil {
			seccomp = podLevel.SeccompProfile
		}
		add(!privileged && (seccomp == nil || seccomp.Type == corev1.SeccompProfileTypeUnconfined), "no seccomp profile")
		if own.Capabilities == nil || !slices.Contains(own.Capabilities.Drop, "ALL") {
			add(!privileged, "default capabilities")
		}
		if own.Capabilities != nil {
			for _, capability := range own.Capabilities.Add {
				add(true, "capability %s", capability)
			}
		}
		for _, p := range c.Ports {
			add(true, "port %s", p.Name)
			add(p.HostPort != 0, "port %d of the host", p.HostPort)
		}
		for _, m := range c.VolumeMounts {
			rights := ""
			if m.ReadOnly {
				rights = ", read-only"
			}
			add(true, "mount %s%s", m.Name, rights)
			add(m.MountPropagation != nil && *m.MountPropagation == corev1.MountPropagationBidirectional,
				"mounts that reach the host, from %s", m.Name)
		}
	}
	slices.Sort(has)
	return slices.Compact(has)
}

// tokens returns the service account tokens that the Pod's volumes project.
func tokens(pod corev1.PodSpec) []corev1.ServiceAccountTokenProjection {
	var all []corev1.ServiceAccountTokenProjection
	for _, v := range pod.Volumes {
		for _, source := range ptr.Deref(v.Projected, corev1.ProjectedVolumeSource{}).Sources {
			if source.ServiceAccountToken != nil {
				all = append(all, *source.ServiceAccountToken)
			}
		}
	}
	return all
}

// with returns things, with who as the prefix of each.
func with(who string, things []string) []string {
	var all []string
	for _, thing := range things {
		all = append(all, who+": "+thing)
	}
	return all
}

// docs/security.md must explain each privilege of the chart's Pods, and list no privilege that they
// do not have.
func TestSecurityPageListsPodPrivileges(t *testing.T) {
	objects, _ := render(t, "--set", "hookPath=/opt/nvidia/bin/nvidia-cdi-hook", "--set", "mps.enabled=true",
		"--set", "passthrough.enabled=true")
	var got []string
	for who, pod := range workloads(objects) {
		got = append(got, with(who, powers(pod))...)
	}
	slices.Sort(got)
	if diff := cmp.Diff(table(t, "## What each container has, and why"), got); diff != "" {
		t.Errorf("%s (-page +chart):\n%s", securityPage, diff)
	}
}

func TestSecurityPageListsEveryRight(t *testing.T) {
	objects, _ := render(t)
	var got []string
	rules := func(role string, rules []rbacv1.PolicyRule) {
		who := map[string]string{plugin: "plugin", uninstaller: "uninstall"}[role]
		for _, rule := range rules {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					got = append(got, fmt.Sprintf("%s %s: %s", who, resource, verb))
				}
			}
		}
	}
	for _, object := range objects {
		switch o := object.(type) {
		case *rbacv1.ClusterRole:
			rules(o.Name, o.Rules)
		case *rbacv1.Role:
			rules(o.Name, o.Rules)
		}
	}
	slices.Sort(got)
	if diff := cmp.Diff(table(t, "## Rights at the API server"), got); diff != "" {
		t.Errorf("%s (-page +chart):\n%s", securityPage, diff)
	}
}

func TestSecurityPageNamesExistingTests(t *testing.T) {
	page, err := os.ReadFile(securityPage)
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for _, m := range regexp.MustCompile("`((?:Test|test|Fuzz)[A-Z][A-Za-z0-9]*)`").FindAllStringSubmatch(string(page), -1) {
		named[m[1]] = true
	}
	if len(named) < 20 {
		t.Errorf("only %d tests are named: %v", len(named), slices.Sorted(maps.Keys(named)))
	}
	for name := range named {
		pattern := `^func (\([a-z]+ \*?[a-z]+\) )?` + name + `\(`
		grep := exec.CommandContext(t.Context(), "grep", "-rqE", "--include=*_test.go", pattern,
			"../../pkg", "../../cmd", "../../test", "../../api", "../../hack")
		if err := grep.Run(); err != nil {
			t.Errorf("test %s does not exist (%v)", name, err)
		}
	}
}

// Each Pod that needs a token mounts its own volume with the three files that client-go reads. The
// API server honours a short token lifetime only if the token is not mounted automatically.
func TestTokensAreMountedAndShortLived(t *testing.T) {
	for name, args := range map[string][]string{"defaults": nil, "everything": everything} {
		objects, _ := render(t, args...)
		for who, pod := range workloads(objects) {
			wants := map[string]int{"plugin": 1, "uninstall": 1, "supervisor": 0}[who]
			if got := tokens(pod); len(got) != wants || *pod.AutomountServiceAccountToken {
				t.Errorf("%s, %s: mounted automatically %t, and %v", name, who, *pod.AutomountServiceAccountToken, got)
				continue
			}
			if wants == 0 {
				continue
			}
			mounts := pod.Containers[0].VolumeMounts
			m := slices.IndexFunc(mounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/var/run/secrets/kubernetes.io/serviceaccount" })
			v := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return m >= 0 && v.Name == mounts[m].Name })
			if v < 0 || !mounts[m].ReadOnly {
				t.Errorf("%s, %s: the mount for client-go is missing or writable: %+v", name, who, mounts)
				continue
			}
			want := &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
				{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token", ExpirationSeconds: ptr.To(int64(3600))}},
				{ConfigMap: &corev1.ConfigMapProjection{
					LocalObjectReference: corev1.LocalObjectReference{Name: "kube-root-ca.crt"},
					Items:                []corev1.KeyToPath{{Key: "ca.crt", Path: "ca.crt"}},
				}},
				{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{
					{Path: "namespace", FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.namespace"}},
				}}},
			}}
			if diff := cmp.Diff(want, pod.Volumes[v].Projected); diff != "" {
				t.Errorf("%s, %s: %s", name, who, diff)
			}
		}
	}
}

func TestNetworkPolicies(t *testing.T) {
	monitoring := `networkPolicy.metricsFrom=[{"podSelector":{"matchLabels":{"app":"prometheus"}}}]`
	addresses := `networkPolicy.apiServer=[{"cidr":"10.0.0.10/32","port":6443}]`
	policies := func(args ...string) map[string]networkingv1.NetworkPolicySpec {
		objects, _ := render(t, slices.Concat(args, withMPS)...)
		by := map[string]networkingv1.NetworkPolicySpec{}
		for who, name := range map[string]string{"plugin": plugin, "supervisor": supervisor, "uninstall": uninstaller + "-network"} {
			policy := only[*networkingv1.NetworkPolicy](t, objects, name)
			selected := 0
			for _, object := range objects {
				switch o := object.(type) {
				case *appsv1.DaemonSet:
					selected += matches(policy.Spec, o.Spec.Template.Labels)
				case *batchv1.Job:
					selected += matches(policy.Spec, o.Spec.Template.Labels)
				}
			}
			if selected != 1 {
				t.Errorf("the policy of %s selects %d of the chart's Pods", who, selected)
			}
			by[who] = policy.Spec
		}
		return by
	}
	in := []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	both := []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}

	byDefault := policies()
	for who, want := range map[string][]networkingv1.PolicyType{"plugin": in, "uninstall": in, "supervisor": both} {
		if diff := cmp.Diff(want, byDefault[who].PolicyTypes); diff != "" {
			t.Errorf("%s: %s", who, diff)
		}
		if len(byDefault[who].Egress) != 0 {
			t.Errorf("%s: %v", who, byDefault[who].Egress)
		}
	}
	rules := byDefault["plugin"].Ingress
	if len(rules) != 1 || len(rules[0].Ports) != 1 || rules[0].Ports[0].Port.StrVal != "http" || len(rules[0].From) != 0 {
		t.Errorf("the plugin's ingress: %+v", rules)
	}
	if len(byDefault["supervisor"].Ingress) != 0 || len(byDefault["uninstall"].Ingress) != 0 {
		t.Error("the supervisor and the uninstall hook must admit no traffic")
	}

	narrow := policies("--set-json", monitoring, "--set-json", addresses)
	if from := narrow["plugin"].Ingress[0].From; len(from) != 1 || from[0].PodSelector.MatchLabels["app"] != "prometheus" {
		t.Errorf("sources that may read metrics: %+v", from)
	}
	for _, who := range []string{"plugin", "uninstall"} {
		spec := narrow[who]
		if diff := cmp.Diff(both, spec.PolicyTypes); diff != "" {
			t.Errorf("%s: %s", who, diff)
		}
		if len(spec.Egress) != 1 || spec.Egress[0].To[0].IPBlock.CIDR != "10.0.0.10/32" || spec.Egress[0].Ports[0].Port.IntVal != 6443 {
			t.Errorf("%s: %+v", who, spec.Egress)
		}
	}
}

func matches(spec networkingv1.NetworkPolicySpec, of map[string]string) int {
	for key, value := range spec.PodSelector.MatchLabels {
		if of[key] != value {
			return 0
		}
	}
	return 1
}
