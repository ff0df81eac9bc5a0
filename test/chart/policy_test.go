package chart

import (
	"cmp"
	"strings"
	"testing"

	"github.com/google/cel-go/cel"
	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apiserver/pkg/admission"
	plugincel "k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/cel/environment"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
)

// expression is a CEL expression as the API server's compiler takes it.
type expression struct {
	name, text string
	returns    *cel.Type
}

func (e expression) GetName() string          { return e.name }
func (e expression) GetExpression() string    { return e.text }
func (e expression) ReturnTypes() []*cel.Type { return []*cel.Type{e.returns} }

// policy is a ValidatingAdmissionPolicy of the chart, compiled for the oldest supported API server.
type policy struct {
	conditions, validations, sentences plugincel.ConditionEvaluator
	messages                           []string // of the validations that have no sentence, or whose sentence fails
}

func compile(t *testing.T, p *admissionregistrationv1.ValidatingAdmissionPolicy) policy {
	t.Helper()
	compiler, err := plugincel.NewCompositedCompiler(environment.MustBaseEnvSet(version.MustParseGeneric("1.34")))
	if err != nil {
		t.Fatal(err)
	}
	var declared plugincel.OptionalVariableDeclarations
	for _, v := range p.Spec.Variables {
		if result := compiler.CompileAndStoreVariable(expression{v.Name, v.Expression, cel.AnyType}, declared,
			environment.NewExpressions); result.Error != nil {
			t.Errorf("variable %s: %v", v.Name, result.Error)
		}
	}
	var conditions, validations, messages []plugincel.ExpressionAccessor
	var compiled policy
	for _, c := range p.Spec.MatchConditions {
		conditions = append(conditions, expression{c.Name, c.Expression, cel.BoolType})
	}
	for _, v := range p.Spec.Validations {
		validations = append(validations, expression{"", v.Expression, cel.BoolType})
		compiled.messages = append(compiled.messages, v.Message)
		messages = append(messages, expression{"", cmp.Or(v.MessageExpression, "''"), cel.StringType})
	}
	compiled.conditions = compiler.CompileCondition(conditions, declared, environment.NewExpressions)
	compiled.validations = compiler.CompileCondition(validations, declared, environment.NewExpressions)
	compiled.sentences = compiler.CompileCondition(messages, declared, environment.NewExpressions)
	for _, errs := range [][]error{
		compiled.conditions.CompilationErrors(), compiled.validations.CompilationErrors(), compiled.sentences.CompilationErrors(),
	} {
		for _, err := range errs {
			if err != nil {
				t.Error(err)
			}
		}
	}
	if t.Failed() {
		t.FailNow()
	}
	return compiled
}

// sliceVerdict returns the policy's verdict (see verdict) on a write of a ResourceSlice by the user
// who. old is nil for a creation, and object is nil for a deletion.
func (p policy) sliceVerdict(t *testing.T, who user.Info, object, old *resourceapi.ResourceSlice) string {
	t.Helper()
	resource := resourceapi.SchemeGroupVersion.WithResource("resourceslices")
	switch {
	case old == nil:
		return p.verdict(t, who, admission.Create, resource, "", object, nil)
	case object == nil:
		return p.verdict(t, who, admission.Delete, resource, "", nil, old)
	}
	return p.verdict(t, who, admission.Update, resource, "", object, old)
}

// verdict returns "" if the policy allows the request. Otherwise it returns the fixed messages of
// the validations that refuse it, and then what the user reads.
func (p policy) verdict(t *testing.T, who user.Info, operation admission.Operation, resource schema.GroupVersionResource,
	subresource string, object, old runtime.Object) string {
	t.Helper()
	written := object
	attributes := &admission.VersionedAttributes{}
	if object != nil {
		attributes.VersionedObject.Set(object)
	} else {
		written = old
	}
	if old != nil {
		attributes.VersionedOldObject.Set(old)
	}
	kinds, _, err := scheme.Scheme.ObjectKinds(written)
	if err != nil {
		t.Fatal(err)
	}
	kind := kinds[0]
	attributes.VersionedKind = kind
	attributes.Attributes = admission.NewAttributesRecord(object, old, kind, "", "name", resource, subresource, operation, nil, false, who)
	request := plugincel.CreateAdmissionRequest(attributes.Attributes, metav1.GroupVersionResource(resource), metav1.GroupVersionKind(kind))
	if !p.all(t, p.conditions, attributes, request, nil) {
		return ""
	}
	refused, first := "", -1
	p.all(t, p.validations, attributes, request, func(i int) {
		refused += p.messages[i]
		if first < 0 {
			first = i
		}
	})
	if first < 0 {
		return ""
	}
	sentences, _, err := p.sentences.ForInput(t.Context(), attributes, request, plugincel.OptionalVariableBindings{}, nil, 1<<24)
	if err != nil {
		t.Fatal(err)
	}
	sentence, _ := sentences[first].EvalResult.Value().(string)
	if sentence == "" || strings.Contains(sentence, "\n") {
		sentence = p.messages[first]
	}
	return refused + "\n" + sentence
}

func (p policy) all(t *testing.T, e plugincel.ConditionEvaluator, attributes *admission.VersionedAttributes,
	request *admissionv1.AdmissionRequest, no func(int)) bool {
	t.Helper()
	results, _, err := e.ForInput(t.Context(), attributes, request, plugincel.OptionalVariableBindings{}, nil, 1<<22)
	if err != nil {
		t.Fatal(err)
	}
	all := true
	for i, result := range results {
		if result.Error != nil {
			t.Fatalf("evaluate %q: %v", result.ExpressionAccessor.GetExpression(), result.Error)
		}
		if result.EvalResult.Value() != true {
			all = false
			if no != nil {
				no(i)
			}
		}
	}
	return all
}

func slice(node *string, driver string) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "slice"},
		Spec: resourceapi.ResourceSliceSpec{Driver: driver, NodeName: node}}
}

func account(name, node string) user.Info {
	extra := map[string][]string{}
	if node != "" {
		extra["authentication.kubernetes.io/node-name"] = []string{node}
	}
	return &user.DefaultInfo{Name: "system:serviceaccount:" + namespace + ":" + name, Extra: extra}
}

func TestPolicyLimitsSlicesToOwnNode(t *testing.T) {
	objects, _ := render(t)
	p := compile(t, only[*admissionregistrationv1.ValidatingAdmissionPolicy](t, objects, plugin))
	var (
		a, b     = ptr.To("node-a"), ptr.To("node-b")
		mine     = slice(a, "gpu.nvidia.com")
		theirs   = slice(b, "gpu.nvidia.com")
		nobodys  = slice(nil, "gpu.nvidia.com")
		foreign  = slice(a, "tpu.example.com")
		me       = account(plugin, "node-a")
		unbound  = account(plugin, "")
		someone  = account("default", "node-b")
		ownNode  = "own node"
		noNode   = "bound to no node"
		ownDrive = "driver gpu.nvidia.com"
	)
	for name, c := range map[string]struct {
		who         user.Info
		object, old *resourceapi.ResourceSlice
		want        string // part of the refusal; empty means that the request is allowed
	}{
		"creates its own":                     {me, mine, nil, ""},
		"updates its own":                     {me, mine, mine, ""},
		"deletes its own":                     {me, nil, mine, ""},
		"creates another node's":              {me, theirs, nil, ownNode},
		"updates another node's":              {me, theirs, theirs, ownNode},
		"deletes another node's":              {me, nil, theirs, ownNode},
		"moves its own to another node":       {me, theirs, mine, ownNode},
		"takes over another node's":           {me, mine, theirs, ownNode},
		"creates one of no node":              {me, nobodys, nil, ownNode},
		"writes for another driver":           {me, foreign, nil, ownDrive},
		"deletes another driver's":            {me, nil, foreign, ownDrive},
		"has a token without a node":          {unbound, mine, nil, noNode},
		"has a token without a node, no node": {unbound, nobodys, nil, noNode},
		"is another account":                  {someone, mine, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := p.sliceVerdict(t, c.who, c.object, c.old)
			if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
				t.Errorf("verdict %q, want %q", got, c.want)
			}
		})
	}
}

// allocated returns a claim that is allocated on this node, with a device status of another driver.
func allocated(node string, change func(*resourceapi.ResourceClaimStatus)) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "claim", Namespace: "user"}, Status: resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
		}}}},
		ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "1"}},
		Devices:     []resourceapi.AllocatedDeviceStatus{{Driver: "nic.example.com", Pool: "p", Device: "d"}},
	}}
	if change != nil {
		change(&c.Status)
	}
	return c
}

// The policy must limit the plugin to its own entries in a claim's status.devices. Before
// Kubernetes 1.36, the right to write a claim's status covers all of the status.
func TestPolicyLimitsClaimStatusToOwnDevices(t *testing.T) {
	objects, _ := render(t)
	p := compile(t, only[*admissionregistrationv1.ValidatingAdmissionPolicy](t, objects, release+"-gpu-dra-driver-claim-status"))
	says := func(s *resourceapi.ResourceClaimStatus) {
		s.Devices = append(s.Devices, resourceapi.AllocatedDeviceStatus{Driver: "gpu.nvidia.com", Pool: "node-a", Device: "gpu-0000-1b-00-0"})
	}
	plain := allocated("node-a", nil)
	first := allocated("node-a", func(s *resourceapi.ResourceClaimStatus) { s.Devices = nil })
	free := &resourceapi.ResourceClaim{ObjectMeta: plain.ObjectMeta}
	for name, c := range map[string]struct {
		who         user.Info
		object, old *resourceapi.ResourceClaim
		want        string // part of the refusal; empty means that the request is allowed
	}{
		"describes a device": {account(plugin, "node-a"), allocated("node-a", says), plain, ""},
		"writes the first status": {account(plugin, "node-a"), allocated("node-a", func(s *resourceapi.ResourceClaimStatus) {
			s.Devices = nil
			says(s)
		}), first, ""},
		"removes its status":              {account(plugin, "node-a"), plain, allocated("node-a", says), ""},
		"writes another node's claim":     {account(plugin, "node-b"), allocated("node-a", says), plain, "its own node"},
		"writes a claim without a device": {account(plugin, "node-a"), free, free, "its own node"},
		"allocates a claim":               {account(plugin, "node-a"), plain, free, "claim's allocation"},
		"changes an allocation": {account(plugin, "node-a"), allocated("node-a", func(s *resourceapi.ResourceClaimStatus) {
			s.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{{Driver: "gpu.nvidia.com", Device: "another"}}
		}), plain, "claim's allocation"},
		"frees a claim": {account(plugin, "node-a"), free, plain, "claim's allocation"},
		"reserves it for another Pod": {account(plugin, "node-a"), allocated("node-a",
			func(s *resourceapi.ResourceClaimStatus) { s.ReservedFor[0].UID = "2" }), plain, "reservations"},
		"removes another driver's status": {account(plugin, "node-a"), allocated("node-a",
			func(s *resourceapi.ResourceClaimStatus) { s.Devices = nil }), plain, "driver gpu.nvidia.com"},
		"changes another driver's status": {account(plugin, "node-a"), allocated("node-a",
			func(s *resourceapi.ResourceClaimStatus) { s.Devices[0].Device = "e" }), plain, "driver gpu.nvidia.com"},
		"has a token without a node": {account(plugin, ""), allocated("node-a", says), plain, "bound to no node"},
		"is another account":         {account("default", "node-b"), free, plain, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := p.verdict(t, c.who, admission.Update, resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), "status", c.object, c.old)
			if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
				t.Errorf("verdict %q, want %q", got, c.want)
			}
		})
	}
}
